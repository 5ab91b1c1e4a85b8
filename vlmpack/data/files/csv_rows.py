"""CSV and TSV: a record a row, under the names of the first; found again by its byte range.

A quoted cell may hold line ends, so a row is as many lines as it takes for its quotes to be even.
The cells of a `.csv` may be parted by semicolons or tabs where its first row is. Cells are texts;
in columns that hold lists elsewhere they may be JSON.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from vlmpack.data.files.json_lines import refuse_wide
from vlmpack.data.files.record import Place, Record
from vlmpack.data.files.spans import read_texts, skip_blank_lines
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.json_text import parse_json
from vlmpack.data.shards.keys import refuse_many_keys
from vlmpack.errors import DataError, schema_error
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import counted, twice

DELIMITERS = (",", ";", "\t")

_TURNS = frozenset(
    ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "texts")
)
"""Columns whose cells are JSON where that is a list of objects."""
_LISTS = frozenset(("image", "images", "history", "answers"))
"""Columns whose cells are JSON where that is a list."""


@dataclass(slots=True)
class CsvRows:
    """The rows of one file below its first.

    Args:
        delimiter: between two cells, unless the first row has none of it and one of another.
    """

    fetcher: Fetcher
    stamp: ShardStamp
    caps: SampleCaps
    delimiter: str = ","
    noun: str = "row"
    _names: list[str] = field(default_factory=list)
    _parted_by: str = ""

    def scan(self) -> Iterator[Record]:
        """See RecordFile."""
        with self.fetcher.open(self.stamp) as stream:
            rows = _spans(stream, self.stamp, self.caps.max_json_bytes)
            self._names = self._header(next(rows, (0, b""))[1])
            number = 0
            for offset, span in rows:
                if not span.strip():
                    continue
                record = self._parsed(Place(number, offset, len(span)), span)
                if record.fault is not None and not span.endswith(b"\n"):
                    raise DataError(
                        f"the file ends inside of row {number + 1}, which {record.fault.reason}; "
                        "it is cut short, and how many rows are missing is unknown",
                        error_class="integrity",
                        shard=self.stamp.path,
                        offset=offset,
                    )
                yield record
                number += 1

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        try:
            if not self._names:
                self._names = self._read_header()
        except DataError as error:
            return [error] * len(places)
        return read_texts(self.fetcher, self.stamp, places, self._parsed)

    def close(self) -> None:
        """See RecordFile."""
        self._names = []

    def _read_header(self) -> list[str]:
        with self.fetcher.open(self.stamp) as stream:
            rows = _spans(stream, self.stamp, self.caps.max_json_bytes)
            return self._header(next(rows, (0, b""))[1])

    def _header(self, span: bytes) -> list[str]:
        self._parted_by = self._said_by(span)
        names = self._cells(span, "the first row", self._parted_by)
        refuse_many_keys(names, self.stamp.path)
        twins = twice(names)
        if not names or not all(names) or twins:
            found = f"twice {twins[0]!r}" if twins else f"{names!r}"
            raise schema_error(
                f"the first row has {found[:200]}; expected the names of the columns, each once",
                shard=self.stamp.path,
            )
        return names

    def _said_by(self, span: bytes) -> str:
        """The delimiter that a first row has."""
        counts = dict.fromkeys((self.delimiter, *DELIMITERS), 0)
        for each in counts:
            with suppress(DataError):
                counts[each] = len(self._cells(span, "the first row", each))
        others = [each for each, count in counts.items() if count > 1]
        return others[0] if len(others) == 1 else self.delimiter

    def _cells(self, span: bytes, what: str, delimiter: str) -> list[str]:
        csv.field_size_limit(max(csv.field_size_limit(), self.caps.max_json_bytes))
        try:
            text = span.decode("utf-8-sig")
            rows = list(csv.reader([text], delimiter=delimiter, strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise schema_error(f"{what} cannot be read: {error}", shard=self.stamp.path) from None
        return rows[0] if rows else []

    def _parsed(self, place: Place, span: bytes) -> Record:
        try:
            cells = self._cells(span, "it", self._parted_by)
            if len(cells) != len(self._names):
                raise schema_error(
                    f"has {counted(len(cells), 'cell')}, and the first row "
                    f"{counted(len(self._names), 'name')}"
                )
        except DataError as fault:
            return Record(place, None, fault)
        named = zip(self._names, cells, strict=True)
        return Record(place, {name: _value(name, cell) for name, cell in named if cell != ""})


def _value(name: str, cell: str) -> Any:
    """A list where the cell of such a column is JSON of one; else its text."""
    if cell[0] != "[" or name not in _TURNS | _LISTS:
        return cell
    try:
        found = parse_json(cell)
    except (ValueError, RecursionError):
        return cell
    is_turns = all(isinstance(item, dict) for item in found)
    return found if name in _LISTS or is_turns else cell


def _spans(stream: BinaryIO, stamp: ShardStamp, most: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each row.

    Raises:
        DataError: class `integrity` where a row does not end, `schema` for another encoding.
    """
    offset = 0
    lines: list[bytes] = []
    length = 0
    is_open = False
    while line := stream.readline(most + 1):
        if not offset and not lines:
            refuse_wide(line, stamp)
        lines.append(line)
        length += len(line)
        is_open ^= line.count(b'"') % 2 == 1
        if length > most:
            raise DataError(
                f"a row of more than {most} bytes; a quote that is not closed runs on to here",
                error_class="integrity",
                shard=stamp.path,
                offset=offset,
            )
        if not is_open and line.endswith(b"\n"):
            row = b"".join(lines)
            yield offset, row
            offset, lines, length = offset + length, [], 0
            if not row.strip():
                offset += skip_blank_lines(stream)[0]
    if is_open:
        raise DataError(
            "the file ends inside of a quoted cell; it is cut short, and how many rows are "
            "missing is unknown",
            error_class="integrity",
            shard=stamp.path,
            offset=offset,
        )
    if lines:
        yield offset, b"".join(lines)
