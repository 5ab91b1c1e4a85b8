"""A large file of JSONL that several processes index: its parts are those of one process."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.families import TINY_MODEL

from vlmpack.data.files.form import FormOptions
from vlmpack.data.files.samples import RecordFiles
from vlmpack.data.files.source_form import find_forms
from vlmpack.data.files.texts import JsonLines
from vlmpack.data.index import lengths, parts, shard_index
from vlmpack.data.index.lengths import LengthsBuilder, ShardBuilder
from vlmpack.data.index.parts import part_for, read_part
from vlmpack.data.index.shard_index import IndexBuilder, IndexRow
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.encode import Encoder
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher, ShardStamp

CAPS = SampleCaps(max_json_bytes=4000)
PIECE = 2000
"""Bytes, so that a few lines are one."""


def record(number: int) -> bytes:
    turns = [
        {"role": "user", "content": f"question {number} " + "é" * (number % 70)},
        {"role": "assistant", "content": "yes " * (1 + number % 9)},
    ]
    extra = {"unread": 1} if number % 5 == 0 else {}
    return json.dumps({"messages": turns, **extra}, ensure_ascii=False).encode()


def lines() -> Iterator[bytes]:
    """Records by the book, and every other kind of line."""
    for number in range(120):
        yield record(number) + (b"\r\n" if number % 7 == 0 else b"\n")
        if number % 11 == 0:
            yield b"\n \t\r\n\n"
        if number % 13 == 0:
            yield b"{no JSON}\n"
        if number % 40 == 0:
            yield b'{"messages": "' + b"x" * (CAPS.max_json_bytes + 5) + b'"}\n'
        if number % 17 == 0:
            yield b'["a list"]\n'


def stamp_of(path: Path) -> ShardStamp:
    [stamp] = find_forms([LocalFetcher().head(str(path))], FormOptions(), LocalFetcher(), CAPS)
    return stamp


@pytest.fixture
def stamp(tmp_path: Path) -> ShardStamp:
    path = tmp_path / "records.jsonl"
    blank = b"\n" * (2 * PIECE)  # which would be a piece without a record
    path.write_bytes(blank + b"\xef\xbb\xbf" + b"".join(lines()) + record(999))
    return stamp_of(path)


def made(stamp: ShardStamp, folder: Path, *, processes: int, apart: bool) -> dict[str, object]:
    """The parts of a file, and their metadata. `apart` measures it behind the index."""
    folder.mkdir()
    index = IndexBuilder(LocalFetcher(), CAPS, processes=processes)
    lengths = LengthsBuilder(index, folder, Encoder(TINY_MODEL))
    both = ShardBuilder.of(lengths)
    builder: IndexBuilder = index if apart else both
    part = part_for(folder, stamp, builder.rule)
    builder(part)
    if apart:
        lengths(lengths.part(stamp))
    found: dict[str, object] = {}
    for name, path in (("index", part.path), ("lengths", lengths.part(stamp).path)):
        table = read_part(path)
        assert table is not None
        found[name] = table.to_pylist(), table.schema
    return found


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parts_are_those_of_one_process(
    stamp: ShardStamp, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = made(stamp, tmp_path / "one", processes=1, apart=apart)
    monkeypatch.setattr(shard_index, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(shard_index, "GROUP_ROWS", 50)
    assert len(RecordFiles(LocalFetcher(), CAPS).pieces(stamp, PIECE)) > 10, "guard"
    found = made(stamp, tmp_path / "two", processes=2, apart=apart)
    assert found == expected
    rows, schema = expected["index"]  # type: ignore[misc]
    faults = {row["reason"].split(":")[0].split(";")[0] for row in rows if row["reason"]}
    assert len(rows) == 121 + 10 + 3 + 8 and len(faults) == 3
    assert json.loads(schema.metadata[b"vlmpack.unknown_keys"]) == {"unread": 24}


@pytest.mark.parametrize("is_parted", [True, False])
def test_few_rows_of_a_large_file_are_held_at_a_time(
    stamp: ShardStamp, is_parted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is indexed, and while its parts are read; no more for a longer file."""
    held: list[int] = []
    to_table = shard_index.to_table

    def spy(rows: Sequence[IndexRow]) -> Any:
        held.append(sum(isinstance(each, IndexRow) for each in gc.get_objects()))
        return to_table(rows)

    monkeypatch.setattr(shard_index, "to_table", spy)
    monkeypatch.setattr(lengths, "to_table", spy)
    monkeypatch.setattr(shard_index, "GROUP_ROWS", 10)
    monkeypatch.setattr(parts, "WHOLE_BYTES", 100)
    if is_parted:
        monkeypatch.setattr(shard_index, "PIECE_BYTES", PIECE)
    found = made(stamp, tmp_path / "i", processes=1, apart=False)
    assert len(held) >= 15 and max(held) <= 20
    for path in (tmp_path / "i").glob("*.part"):
        opened = parts.open_part(str(path))
        assert opened is not None and opened.num_rows == sum(opened.group_sizes) == 142
        groups = [table.num_rows for table in opened.groups()]
        assert groups == opened.group_sizes and len(groups) >= 15 and max(groups) <= 10
        whole = pq.read_table(pa.BufferReader(path.read_bytes()[: -parts.SEAL_BYTES]))
        assert whole.to_pylist() in [rows for rows, _ in found.values()]  # type: ignore[misc]
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(DataError, match=f"{path.name} cannot be read any more"):
            list(opened.groups())
        assert parts.open_part(str(path)) is None


@pytest.mark.parametrize("num_bytes", [1, 500, PIECE, 1 << 20])
def test_pieces_hold_every_record_once(stamp: ShardStamp, num_bytes: int) -> None:
    file = JsonLines(LocalFetcher(), stamp, CAPS)
    whole, parts = [*file.scan()], [*file.pieces(num_bytes)]
    found = [
        record
        for lines in parts
        for record in JsonLines(LocalFetcher(), stamp, CAPS, lines=lines).scan()
    ]
    assert [(r.place, r.value, r.line, str(r.fault)) for r in found] == [
        (r.place, r.value, r.line, str(r.fault)) for r in whole
    ]
    ends = [lines.offset + lines.length for lines in parts]
    assert [lines.offset for lines in parts] == [2 * PIECE, *ends[:-1]] and ends[-1] == stamp.size
    assert min((lines.length for lines in parts[:-1]), default=num_bytes) >= num_bytes


@pytest.mark.parametrize("fault", ["cut", "changed"])
def test_a_damaged_file_is_as_one_process_says(
    stamp: ShardStamp, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(stamp.path)
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-20])
        stamp = replace(LocalFetcher().head(stamp.path), form=stamp.form)
    else:
        path.write_bytes(path.read_bytes() + b"\n" + record(7))
    said = []
    for name, processes in (("one", 1), ("two", 2)):
        with pytest.raises(DataError) as found:
            made(stamp, tmp_path / name, processes=processes, apart=False)
        said.append((str(found.value), found.value.error_class))
        monkeypatch.setattr(shard_index, "PIECE_BYTES", PIECE)
        assert not list((tmp_path / name).glob("*.part"))
    assert said[0] == said[1]


def test_pieces_that_forget_their_number_are_found(stamp: ShardStamp) -> None:
    """The control."""
    file = JsonLines(LocalFetcher(), stamp, CAPS)
    second = [*file.pieces(PIECE)][1]
    for lines in (replace(second, number=0), replace(second, lines_before=0)):
        wrong = JsonLines(LocalFetcher(), stamp, CAPS, lines=lines)
        right = JsonLines(LocalFetcher(), stamp, CAPS, lines=second)
        assert [(r.place, r.line) for r in wrong.scan()] != [
            (r.place, r.line) for r in right.scan()
        ]
