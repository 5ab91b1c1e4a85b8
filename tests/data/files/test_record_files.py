"""Files of records, read as they lie: the batches of the same samples in shards, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.record_data import COUNT, KINDS, TABLES, write_records, write_same_shards
from support.shard_fakes import loading, micro_batches, open_data

from vlmpack.data.files.tables import KeptRows
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe.sources import Source


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kind -> path of the same COUNT records, shards among them."""
    folder = tmp_path_factory.mktemp("records")
    numbers = range(COUNT)
    paths = {kind: write_records(folder / kind.replace(" ", "-"), kind, numbers) for kind in KINDS}
    return paths | {"tar": write_same_shards(folder / "tar", numbers)}


def opened(path: str, index_dir: Path, **changes: Any) -> TrainData:
    changes.setdefault("shuffle", "global")
    return open_data("", index_dir, sources=(Source(name="d", path=path),), **changes)


def assert_same(ours: list[MicroBatch], theirs: list[MicroBatch]) -> None:
    """The same samples and tensors; shards and keys are those of each."""
    assert len(ours) == len(theirs) > 0
    assert sum(m.batch.media is not None for m in theirs) > 2, "no images were compared"
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one.batch.input_ids, two.batch.input_ids)
        assert torch.equal(one.batch.labels, two.batch.labels)
        assert (one.batch.media is None) == (two.batch.media is None)
        if one.batch.media is not None and two.batch.media is not None:
            assert torch.equal(one.batch.media.pixel_values, two.batch.media.pixel_values)


@pytest.mark.cases(quick=("0-json", "0-csv", "0-parquet"), slow=("0-jsonl", "2-arrow"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_file_gives_the_batches_of_the_same_samples_in_shards(
    written: dict[str, str], tmp_path: Path, kind: str, workers: int
) -> None:
    ours = opened(written[kind], tmp_path / "ours", **loading(workers))
    theirs = opened(written["tar"], tmp_path / "theirs")
    assert ours.steps_per_epoch() == theirs.steps_per_epoch() == 5
    assert_same(micro_batches(ours, 10), micro_batches(theirs, 10))


@pytest.mark.cases(slow="jsonl")
@pytest.mark.parametrize("kind", ["jsonl", "parquet of bytes"])
def test_a_window_of_files_is_that_of_shards_with_the_same_partition(
    tmp_path: Path, small_windows: None, kind: str
) -> None:
    for part, first in enumerate(range(0, COUNT, 10)):
        numbers = range(first, min(first + 10, COUNT))
        write_records(tmp_path / "files", kind, numbers, f"part-{part}")
    shards = write_same_shards(tmp_path / "tar", range(COUNT), per_shard=10)
    ours = opened(f"{tmp_path}/files/part-*.{kind.split()[0]}", tmp_path / "a", shuffle="window")
    theirs = opened(shards, tmp_path / "b", shuffle="window")
    assert_same(micro_batches(ours, 10), micro_batches(theirs, 10))


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_shuffled_by_window_where_nobody_says_how(
    written: dict[str, str], tmp_path: Path, kind: str
) -> None:
    assert opened(written[kind], tmp_path, shuffle="auto").identity["data.shuffle"] == "window"


def test_texts_are_shuffled_whole_where_nobody_says_how(
    written: dict[str, str], tmp_path: Path
) -> None:
    data = opened(written["jsonl"], tmp_path, shuffle="auto")
    assert data.identity["data.shuffle"] == "global"


@pytest.mark.cases(quick="4-jsonl", slow="2-arrow")
@pytest.mark.parametrize("kind", ["jsonl", "arrow"])
@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_share_the_batches_of_a_file_and_a_resume_goes_on_in_them(
    written: dict[str, str], tmp_path: Path, kind: str, dp: int
) -> None:
    data = opened(written[kind], tmp_path)
    whole = [_keys(data, data.start(), steps=6, dp=1)]
    first, middle = _run(data, data.start(), steps=2, dp=dp)
    second, _ = _run(opened(written[kind], tmp_path), middle, steps=4, dp=1)
    assert [first + second] == whole
    assert len(first) == 2 and len(second) == 4


def _keys(data: TrainData, state: DataState, *, steps: int, dp: int) -> list[list[str]]:
    return _run(data, state, steps=steps, dp=dp)[0]


def _run(
    data: TrainData, state: DataState, *, steps: int, dp: int
) -> tuple[list[list[str]], DataState]:
    most = state.batches + steps
    ranks = [list(data.batches(state, rank=r, dp=dp, max_steps=most)) for r in range(dp)]
    found = []
    for shares in zip(*ranks, strict=True):
        samples = [s for share in shares for m in share.micro_batches for s in m.samples]
        found.append(sorted(f"{sample.shard}#{sample.key}" for sample in samples))
    return found, ranks[0][-1].state


@pytest.mark.slow
def test_sources_of_several_kinds_are_one_blend(written: dict[str, str], tmp_path: Path) -> None:
    kinds = ("tar", "jsonl", "parquet of bytes", "arrow", "csv")
    sources = tuple(Source(name=kind.replace(" ", "-"), path=written[kind]) for kind in kinds)
    data = open_data("", tmp_path, sources=sources, shuffle="global")
    assert data.fitted.table.num_samples == 5 * COUNT
    found = micro_batches(data, data.steps_per_epoch())
    shards = {sample.shard.rpartition(".")[2] for micro in found for sample in micro.samples}
    assert shards == {"tar", "jsonl", "parquet", "arrow", "csv"}
    assert sum(len(micro.samples) for micro in found) == 5 * COUNT
    assert not [hole for micro in found for hole in micro.skipped]


def test_a_source_of_shards_and_other_files_is_refused(
    written: dict[str, str], tmp_path: Path
) -> None:
    one = Path(written["tar"]).parent / "train-000000.tar"
    mixed = Path(one).parent / "more.jsonl"
    mixed.write_text("")
    with pytest.raises(RecipeError, match="JSONL and tar files in one source; expected shards"):
        opened(f"{one.parent}/{{train-000000.tar,more.jsonl}}", tmp_path)
    mixed.unlink()


def test_the_root_of_images_may_be_another_folder(tmp_path: Path) -> None:
    path = Path(write_records(tmp_path / "photos", "jsonl", range(COUNT)))
    moved = tmp_path / "train.jsonl"
    path.rename(moved)
    with pytest.raises(DataError, match=r"data\.image_root of a recipe, or --images DIR"):
        opened(str(moved), tmp_path / "i", on_error={"integrity": "raise"})
    source = Source(name="d", path=str(moved), image_root=str(tmp_path / "photos"))
    data = open_data("", tmp_path / "i", sources=(source,))
    assert micro_batches(data, 1)[0].batch.media is not None


def test_what_a_record_says_is_part_of_the_datas_identity(tmp_path: Path) -> None:
    path = Path(write_records(tmp_path, "jsonl", range(COUNT)))
    before = opened(str(path), tmp_path / "i").identity
    text = path.read_text().replace("q3,", "Q3,")
    path.write_text(text)
    after = opened(str(path), tmp_path / "i").identity
    assert before != after
    assert {key for key in before if before[key] != after[key]} == {"data.train.d"}


def test_a_row_group_that_is_too_large_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmpack.data.files.tables.MAX_GROUP_BYTES", 1000)
    path = write_records(tmp_path, "parquet of bytes", range(COUNT))
    with pytest.raises((DataError, RecipeError), match="row_group_size=100"):
        opened(path, tmp_path / "i")


def test_stamps_differ_in_nothing_but_their_form(written: dict[str, str], tmp_path: Path) -> None:
    data = opened(written["jsonl"], tmp_path)
    [stamp] = data.fitted.table.shards
    assert stamp.form and replace(stamp, form="") == stamp


def test_a_large_column_that_nobody_reads_is_no_reason_to_refuse_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(write_records(tmp_path, "parquet", range(COUNT)))
    table = pq.read_table(path)
    noise = [bytes(200_000 + number) for number in range(COUNT)]
    wide = table.append_column("mask_of_nobody", pa.array(noise))
    pq.write_table(wide, path, row_group_size=5, compression="none")
    monkeypatch.setattr("vlmpack.data.files.tables.MAX_GROUP_BYTES", 500_000)
    assert opened(str(path), tmp_path / "i").fitted.table.num_samples == COUNT


@pytest.mark.cases(quick="arrow")
@pytest.mark.parametrize("kind", TABLES)
def test_groups_of_rows_that_are_kept_are_bounded_over_all_files_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    paths = [write_records(tmp_path, kind, range(n, n + COUNT), f"part-{n}") for n in (0, 50)]
    sources = tuple(Source(name=f"d{n}", path=path) for n, path in enumerate(paths))
    data = open_data("", tmp_path / "i", sources=sources, shuffle="global")
    reader, made = data.dataset.reader, []
    kept = reader.files._rows
    for stamp in data.fitted.table.shards:
        kept.drop(stamp.path)  # what was read when the split was opened
    assert not kept._tables and not kept._bytes
    kept.most = 3_000
    decode = KeptRows.get

    def noted(self: KeptRows, path: str, place: Hashable, make: Callable[[], Any]) -> Any:
        def counted() -> Any:
            made.append(path)
            return make()

        found = decode(self, path, place, counted)
        tables = list(self._tables.values())
        assert sum(table.nbytes for table in tables) == self._bytes
        assert self._bytes <= max(self.most, tables[-1].nbytes)
        return found

    monkeypatch.setattr(KeptRows, "get", noted)
    refs = [data.ref(number) for number in range(2 * COUNT)]
    found = reader.read_all(refs[::2] + refs[1::2])
    assert not [each for each in found if isinstance(each, DataError)]
    assert len(set(made)) > 1 and len(made) > len(set(made)), "nothing had to make room"
