"""What is written in another way and means the same is read as the same sample."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.record_data import COUNT, write_records
from support.shard_fakes import image_bytes, open_data

from vlmpack.data.files.form import FormOptions
from vlmpack.data.files.registered import as_mapping
from vlmpack.data.files.samples import RecordFiles, place_of_key
from vlmpack.data.files.source_form import find_forms
from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps
from vlmpack.data.shards.samples import RawSample
from vlmpack.errors import DataError
from vlmpack.recipe.sources import Source
from vlmpack.storage.fetch import LocalFetcher

FETCHER, CAPS = LocalFetcher(), SampleCaps()


def samples_of(path: Path) -> list[RawSample]:
    """The samples of one file, by the readers of a run."""
    [stamp] = find_forms([FETCHER.head(str(path))], FormOptions(), FETCHER, CAPS)
    return list(RecordFiles(FETCHER, CAPS).samples(stamp))


def document_of(path: Path) -> dict[str, Any]:
    """The only sample's."""
    [sample] = samples_of(path)
    assert sample.fault is None, sample.fault
    found = json.loads(sample.payload(JSON_FIELD))
    assert isinstance(found, dict)
    return found


def as_jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def as_json(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text(json.dumps(records))
    return path


def as_parquet(path: Path, *records: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(records)), path)
    return path


WRITERS = {"jsonl": as_jsonl, "json": as_json, "parquet": as_parquet}


def with_tools(**spare: Any) -> dict[str, Any]:
    """A record with a tool and a call, each with these keys more."""
    properties = {"x": {"type": "integer"}, **spare}
    parameters = {"type": "object", "properties": properties, "required": ["x"]}
    call = {"type": "function", "function": {"name": "move", "arguments": {"x": 0, **spare}}}
    return {
        "tools": [{"type": "function", "function": {"name": "move", "parameters": parameters}}],
        "messages": [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "ok"},
            {"role": "assistant", "content": "Done."},
        ],
    }


@pytest.mark.parametrize("kind", WRITERS)
def test_null_in_tools_and_arguments_is_absent_in_every_kind_of_file(
    tmp_path: Path, kind: str
) -> None:
    found = document_of(WRITERS[kind](tmp_path / f"x.{kind}", with_tools(city=None)))
    assert found == document_of(as_jsonl(tmp_path / "bare.jsonl", with_tools()))
    other = document_of(as_jsonl(tmp_path / "said.jsonl", with_tools(city="Oslo")))
    assert other != found and "Oslo" in json.dumps(other)


def test_null_of_a_programs_source_is_absent_too() -> None:
    assert as_mapping(with_tools(city=None), "python:x") == as_mapping(
        json.loads(json.dumps(with_tools()).replace('"content": null, ', "")), "python:x"
    )


def test_null_in_tools_that_are_text_is_what_their_author_wrote(tmp_path: Path) -> None:
    tools = with_tools(city=None)["tools"]
    record = with_tools() | {"tools": json.dumps(tools)}
    both = [document_of(write(tmp_path / f"x.{k}", record)) for k, write in WRITERS.items()]
    assert all(found["tools"] == tools for found in both)


def test_records_nested_as_deeply_as_json_is_read_lose_their_nulls(tmp_path: Path) -> None:
    deep: Any = None
    for _ in range(400):
        deep = {"a": deep, "b": None}
    turns = with_tools()["messages"]
    assert samples_of(as_jsonl(tmp_path / "x.jsonl", {"messages": turns, "d": deep}))


EMPTY: list[Any] = ["", [""], None, [], [None], {"bytes": None, "path": None}, [{"path": ""}]]


@pytest.mark.parametrize("name", ["image", "images"])
@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_an_image_that_is_empty_is_none(tmp_path: Path, name: str, empty: Any) -> None:
    turns = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    }
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    llava = {"conversations": said}
    bare = document_of(as_jsonl(tmp_path / "bare.jsonl", turns))
    for record in (turns, llava, {"question": "Hi", "answer": "Ho"}):
        assert document_of(as_jsonl(tmp_path / "x.jsonl", record | {name: empty})) == bare
    marked = {"messages": [{"role": "user", "content": "<image>"}, turns["messages"][1]]}
    asked = {"conversations": [{"from": "human", "value": "<image>Hi"}, said[1]]}
    assert document_of(as_jsonl(tmp_path / "y.jsonl", marked | {name: empty}))["messages"]
    [sample] = samples_of(as_jsonl(tmp_path / "z.jsonl", asked | {name: empty}))
    assert sample.fault is not None and "without a name" in sample.fault


def write_csv(path: Path, delimiter: str, rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


@pytest.mark.parametrize("end", ["csv", "tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_cells_are_parted_as_the_first_row_is(tmp_path: Path, end: str, delimiter: str) -> None:
    rows = [["question", "answer", "image"], ["Which; one, or\ttwo?", 'a "red" one;', "0.png"]]
    (tmp_path / "0.png").write_bytes(image_bytes(20, 20, seed=1))
    path = write_csv(tmp_path / f"x.{end}", delimiter, rows)
    [sample] = samples_of(path)
    [stamp] = find_forms([FETCHER.head(str(path))], FormOptions(), FETCHER, CAPS)
    assert sample.fault is None and sample.fields == (JSON_FIELD, "0.png")
    turns = json.loads(sample.payload(JSON_FIELD))["messages"]
    assert turns[0]["content"][1]["text"] == rows[1][0] and turns[1]["content"] == rows[1][1]
    again = RecordFiles(FETCHER, CAPS)  # as a worker reads it, which scans nothing before
    places = [("0.png",)]
    place = place_of_key(sample.key, sample.offset, sample.length, 0)
    assert again.documents(stamp, [place], places) == [sample.payload(JSON_FIELD)]


def test_a_first_row_with_its_own_delimiter_keeps_it(tmp_path: Path) -> None:
    rows = [["question", "answer", "a;b;c;d;e"], ["Q", "A", "x"]]
    assert document_of(write_csv(tmp_path / "x.csv", ",", rows))["messages"][1]["content"] == "A"


def cached(folder: Path, end: str = "../../../blobs/1") -> Path:
    """A data set in the Hub's cache."""
    root = folder / "datasets--x--y"
    (root / "blobs").mkdir(parents=True)
    (root / "blobs/1").write_bytes(image_bytes(20, 20, seed=1))
    record = {"question": "Q", "answer": "A", "image": "images/g.png"}
    as_jsonl(root / "blobs/2", record)
    snapshot = root / "snapshots/abc"
    (snapshot / "images").mkdir(parents=True)
    (snapshot / "images/g.png").symlink_to(end)
    (snapshot / "train.jsonl").symlink_to("../../blobs/2")
    return snapshot / "train.jsonl"


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    [sample] = samples_of(cached(tmp_path))
    assert sample.fault is None and sample.payload("0.png") == image_bytes(20, 20, seed=1)
    source = Source(name="d", path=str(tmp_path / "datasets--x--y/snapshots/*/train.jsonl"))
    assert not open_data("", tmp_path / "i", sources=(source,)).fitted.table.bad.any()


@pytest.mark.parametrize("end", ["../../../../secret.png", "../../../blobs/../../secret.png"])
def test_other_links_out_of_it_are_not(tmp_path: Path, end: str) -> None:
    (tmp_path / "secret.png").write_bytes(image_bytes(20, 20, seed=2))
    [sample] = samples_of(cached(tmp_path, end))
    assert sample.fault is not None and "lies outside the image root" in sample.fault


def test_a_folder_of_blobs_beside_any_other_folder_is_outside(tmp_path: Path) -> None:
    path = cached(tmp_path)
    shutil.move(path.parent.parent, tmp_path / "datasets--x--y/copies")
    [sample] = samples_of(tmp_path / "datasets--x--y/copies/abc/train.jsonl")
    assert sample.fault is not None and "lies outside the image root" in sample.fault


def test_a_path_of_windows_is_named(tmp_path: Path) -> None:
    path = Path(write_records(tmp_path, "jsonl", range(COUNT)))
    path.write_text(path.read_text().replace("pictures/", r"pictures\\"))
    with pytest.raises(DataError, match=r"has a '\\', as paths of Windows do: expected '/'"):
        source = Source(name="d", path=str(path))
        open_data("", tmp_path / "i", sources=(source,), on_error={"integrity": "raise"})
