"""Data that a program hands over: the batches of the same samples in shards, and its faults."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from support.handed_over import Exits, Nonsense, Raises, Records, Restless, asked, swapped
from support.record_data import COUNT, record, write_records, write_same_shards
from support.shard_fakes import loading, micro_batches, open_data

from vlmpack.build.source_text import fingerprint
from vlmpack.data.files.registered import Registered, RegisteredFetcher, checked
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe.sources import Source
from vlmpack.storage.fetch import LocalFetcher

COLUMNS = "python:asked"


def opened(path: str, index_dir: Path, handed: dict[str, Any], **changes: Any) -> TrainData:
    """A split over one source, with what a program handed over."""
    columns = changes.pop("columns", None)
    registered = Registered(
        {name: value for name, value in handed.items() if hasattr(value, "__len__")},
        {name: value for name, value in handed.items() if not hasattr(value, "__len__")},
        {name: fingerprint(value) for name, value in handed.items()},
    )
    return open_data(
        "",
        index_dir,
        sources=(Source(name="d", path=path, columns=columns),),
        fetcher=RegisteredFetcher(LocalFetcher(), registered),
        shuffle=changes.pop("shuffle", "global"),
        **changes,
    )


def one_shard(folder: Path) -> str:
    """The records as one shard: windows are cut by shards."""
    return write_same_shards(folder / "tar", range(COUNT), per_shard=COUNT)


def assert_same(ours: TrainData, theirs: TrainData) -> None:
    mine, other = micro_batches(ours, 8), micro_batches(theirs, 8)
    assert len(mine) == len(other) > 0
    assert sum(m.batch.media is not None for m in other) > 2, "no images were compared"
    for one, two in zip(mine, other, strict=True):
        assert torch.equal(one.batch.input_ids, two.batch.input_ids)
        assert torch.equal(one.batch.labels, two.batch.labels)
        if two.batch.media is not None:
            assert one.batch.media is not None
            assert torch.equal(one.batch.media.pixel_values, two.batch.media.pixel_values)


@pytest.mark.cases(quick="0-global", slow="0-window")
@pytest.mark.parametrize("shuffle", ["global", "window"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_source_gives_the_batches_of_the_same_samples_in_shards(
    tmp_path: Path, workers: int, shuffle: str
) -> None:
    """The images come back as PNG files of the same pixels."""
    theirs = open_data(
        "",
        tmp_path / "b",
        sources=(Source(name="d", path=one_shard(tmp_path)),),
        shuffle=shuffle,
    )
    handed = {"mine": Records(COUNT)}
    ours = opened("python:mine", tmp_path / "a", handed, shuffle=shuffle, **loading(workers))
    assert_same(ours, theirs)


def test_a_function_makes_records_of_those_of_a_file(tmp_path: Path) -> None:
    theirs = opened(write_records(tmp_path / "a", "jsonl", range(COUNT)), tmp_path / "x", {})
    rows = [swapped(record(number)) for number in range(COUNT)]
    odd = tmp_path / "a" / "odd.jsonl"
    odd.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = opened(str(odd), tmp_path / "y", {"asked": asked}, columns=COLUMNS)
    assert_same(ours, theirs)
    with pytest.raises(RecipeError, match="no layout fits"):
        opened(str(odd), tmp_path / "z", {})


def test_a_function_makes_records_of_those_of_a_shard(tmp_path: Path) -> None:
    """The same shards with their turns under keys of no layout."""
    plain = one_shard(tmp_path)
    odd = tmp_path / "odd.tar"
    [path] = sorted(Path(plain).parent.glob(Path(plain).name))
    with tarfile.open(path) as source, tarfile.open(odd, "w") as out:
        for member in source:
            data = source.extractfile(member).read()  # type: ignore[union-attr]
            if member.name.endswith(".json"):
                turns = json.loads(data)
                data = json.dumps({"turns": turns.pop("messages"), **turns}).encode()
                member.size = len(data)
            out.addfile(member, BytesIO(data))
    ours = opened(str(odd), tmp_path / "x", {"asked": back}, columns=COLUMNS)
    assert_same(ours, opened(plain, tmp_path / "y", {}))


def back(made: dict[str, Any]) -> dict[str, Any]:
    return {"messages": made["turns"], "id": made["id"], "images": made.get("images", [])}


def test_the_form_of_a_function_changes_with_its_text(tmp_path: Path) -> None:
    """So that the index of the records that another one made is not taken."""
    path = write_records(tmp_path / "a", "jsonl", range(4))
    forms = set()
    for function in (lambda made: dict(made), lambda made: {**made}):
        data = opened(path, tmp_path / "x", {"asked": function}, columns=COLUMNS)
        forms |= {stamp.form for stamp in data.split.fitted.table.shards}  # type: ignore[attr-defined]
    assert len(forms) == 2 and all("asked@" in form for form in forms)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Exits(12), r"python:mine\[5\] raised SystemExit: enough \(handed_over.py, line"),
        (Raises(12), r"python:mine\[5\] raised KeyError: 'no such picture' \(handed_over.py, line"),
        (Nonsense(12), r"python:mine\[5\] returned an int; expected a record"),
    ],
)
def test_a_fault_of_a_source_is_that_of_its_record(
    tmp_path: Path, source: Records, said: str
) -> None:
    with pytest.raises(DataError, match=said) as raised:
        opened("python:mine", tmp_path / "x", {"mine": source})
    assert raised.value.shard == "python:mine" and raised.value.error_class == "schema"


def test_a_record_that_is_never_the_same_is_left_out_with_what_to_do(tmp_path: Path) -> None:
    data = opened("python:mine", tmp_path / "x", {"mine": Restless(12)})
    left_out = [hole for m in micro_batches(data, 3) for hole in m.skipped]
    assert left_out and {hole.error_class for hole in left_out} == {"integrity"}
    said = "a source must return the same record each time; raise its `version`"
    assert all(said in hole.reason for hole in left_out)
    steady = opened("python:mine", tmp_path / "x", {"mine": Records(12)})
    assert not [hole for m in micro_batches(steady, 3) for hole in m.skipped]


def test_the_records_of_a_source_that_fails_are_left_out_where_the_recipe_says(
    tmp_path: Path,
) -> None:
    on_error = {"schema": "skip"}
    data = opened("python:mine", tmp_path / "x", {"mine": Raises(12)}, on_error=on_error)
    taken = {key for m in micro_batches(data, 4) for key in m.batch.keys}
    assert len(taken) == 11 and "000000005" not in taken


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "f returned missing; expected a record"),
        ({1: 2}, "f returned a record with the key 1; expected a text"),
    ],
)
def test_nonsense_of_a_function_is_named(made: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        checked(lambda value: made, "f")({})


def test_a_list_of_turns_is_a_record() -> None:
    assert checked(lambda value: [{"role": "user"}], "f")({}) == {"messages": [{"role": "user"}]}
