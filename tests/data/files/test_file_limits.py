"""Limits hold where a file is scanned and where a record of it is read again, alike."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmpack.data.files.record import Record
from vlmpack.data.files.records import open_file
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import DataError
from vlmpack.limits import MAX_RECORD_KEYS
from vlmpack.storage.fetch import LocalFetcher, ShardStamp


class CountingLines(io.BufferedReader):
    """A file whose lines are counted as they are asked for."""

    asked = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        CountingLines.asked += 1
        return super().readline(size)


class Fetcher(LocalFetcher):
    def open(self, stamp: ShardStamp) -> BinaryIO:
        return CountingLines(io.FileIO(stamp.path), 1 << 16)


def every(names: Sequence[str]) -> Sequence[str]:
    return names


def opened(path: Path) -> Any:
    fetcher = Fetcher()
    return open_file(fetcher, fetcher.head(str(path)), SampleCaps(), every)


def scanned_and_read(path: Path) -> list[tuple[Record, Record]]:
    """Each record, as it is scanned and as another process reads it."""
    records = list(opened(path).scan())
    again = opened(path).read([record.place for record in records])
    return list(zip(records, again, strict=True))


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return path


def test_a_first_row_of_many_bytes_is_read_as_it_was_scanned(tmp_path: Path) -> None:
    names = [f"{n:04d}" + "x" * 40 for n in range(2000)]
    path = write_csv(tmp_path / "a.csv", [names, [str(n) for n in range(2000)]])
    assert path.read_bytes().index(b"\n") > 1 << 16
    ((scanned, read),) = scanned_and_read(path)
    assert scanned.value is not None and scanned.value["0007" + "x" * 40] == "7"
    assert read.value == scanned.value


def write_keys(folder: Path, kind: str, count: int) -> Path:
    record = {f"k{n}": "v" for n in range(count)}
    path = folder / f"{count}.{kind}"
    if kind == "csv":
        write_csv(path, [[*record], [*record.values()]])
    elif kind == "jsonl":
        path.write_text(json.dumps(record) + "\n")
    elif kind == "json":
        path.write_text(json.dumps([record]))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        table = pa.Table.from_pylist([record])
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet", "arrow"])
def test_more_keys_than_the_limit_are_refused_at_scan_and_at_read(
    tmp_path: Path, kind: str
) -> None:
    ((scanned, read),) = scanned_and_read(write_keys(tmp_path, kind, MAX_RECORD_KEYS))
    assert scanned.value is not None and scanned.value == read.value

    path, expected = write_keys(tmp_path, kind, MAX_RECORD_KEYS + 1), "4,097 keys or columns; at"
    if kind in ("jsonl", "json"):
        ((scanned, read),) = scanned_and_read(path)
        assert expected in str(scanned.fault) and expected in str(read.fault)
        return
    with pytest.raises(DataError, match=expected) as caught:
        list(opened(path).scan())
    assert caught.value.shard == str(path), "of many files, which"
    place = next(opened(write_keys(tmp_path, kind, 1)).scan()).place
    (refused,) = opened(path).read([place])
    assert isinstance(refused, DataError) and expected in str(refused)


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b"  \t\n", b"\n \r\n"])
def test_lines_without_text_are_gone_past_many_at_a_time(tmp_path: Path, blank: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + blank * 50_000 + b'  {"b": 2}\n' + blank + b'{"c": 3}')
    CountingLines.asked = 0
    found = scanned_and_read(path)
    assert [scanned.value for scanned, _ in found] == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert [read.value for _, read in found] == [{"a": 1}, {"b": 2}, {"c": 3}]
    lines = blank.count(b"\n")
    assert [scanned.line for scanned, _ in found] == [1, 50_000 * lines + 2, 50_001 * lines + 3]
    assert 3 <= CountingLines.asked < 60

    path = tmp_path / "a.csv"
    path.write_bytes(b"q,a\n1,2\n" + blank * 50_000 + b"3,4\n" + blank + b'"5\n\n",6\n')
    CountingLines.asked = 0
    found = scanned_and_read(path)
    assert [scanned.value for scanned, _ in found] == [
        {"q": "1", "a": "2"},
        {"q": "3", "a": "4"},
        {"q": "5\n\n", "a": "6"},
    ]
    assert [read.value for _, read in found] == [scanned.value for scanned, _ in found]
    assert 3 <= CountingLines.asked < 60
