"""Text files of records: JSONL, JSON, CSV and TSV. A record is found again by its byte range.

JSONL has a record a line; lines without text are skipped.

JSON is one list of records, as in LLaVA. It is parsed item by item, so one item is in memory at a
time whatever the size of the file.

CSV and TSV have a record a row, under the names of the first. A quoted cell may hold line ends, so
a row takes as many lines as its quotes need to be even. The cells of a `.csv` may be separated by
semicolons or tabs, as in its first row. Cells are texts; in columns that hold lists elsewhere they
may be JSON.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, cast

from vlmpack.addresses import is_remote
from vlmpack.data.files.record import Place, Record, RecordFile, as_record
from vlmpack.data.shards.naming import SampleCaps, parse_json, refuse_many_keys
from vlmpack.errors import DataError, integrity_error, or_error, schema_error
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import counted, kind_of, twice

WIDE_TEXT = (b"\xff\xfe", b"\xfe\xff")
"""How UTF-16 and UTF-32 begin."""
READ_BYTES = 1 << 20
DELIMITERS = (",", ";", "\t")
_BLANK = re.compile(rb"[ \t\n\r\v\f]*")
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_TURNS = frozenset(
    ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "texts")
)
"""Columns whose cells are parsed as JSON where they hold a list of objects."""
_LISTS = frozenset(("image", "images", "history", "answers"))
"""Columns whose cells are JSON where that is a list."""


@dataclass(slots=True)
class TextFile(RecordFile):
    """A file whose records are texts."""

    fetcher: Fetcher
    stamp: ShardStamp
    caps: SampleCaps

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        try:
            self._open()
        except DataError as error:
            return [error] * len(places)
        spans = _read_spans(self.fetcher, self.stamp, places)
        return [
            span if isinstance(span, DataError) else self._parse(place, span)
            for place, span in zip(places, spans, strict=True)
        ]

    def _open(self) -> None:
        """Read what is needed before a record can be parsed, once."""

    def _parse(self, place: Place, span: bytes) -> Record:
        """The record that some bytes of the file are."""
        return _parse_json(place, span)


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines of a file, which are scanned without the others.

    Args:
        offset, length: of their bytes.
        number: of the first record in them, counted from 0.
        lines_before: how many lie in front of them.
    """

    offset: int
    length: int
    number: int
    lines_before: int


@dataclass(slots=True)
class JsonLines(TextFile):
    """The lines of one file; those without text are none.

    Args:
        lines: those that are scanned, of a file whose stream can seek; None for all.
    """

    noun = "line"

    lines: Lines | None = None

    def scan(self) -> Generator[Record]:
        """See RecordFile.

        Raises:
            DataError: class `integrity` where the file ends inside of a line, else as there.
        """
        with self.fetcher.open(self.stamp) as stream:
            if self.lines is not None:
                stream.seek(self.lines.offset)
            for place, line, line_number in self._records(stream):
                if place.length > self.caps.max_json_bytes:
                    yield _too_long(place, self.caps.max_json_bytes, line_number)
                    continue
                record = replace(self._parse(place, line), line=line_number)
                if record.fault is not None and not line.endswith(b"\n"):
                    what = f"line {line_number}, which is no JSON"
                    raise _cut_short(self.stamp, what, "records", place.offset)
                yield record

    def pieces(self, num_bytes: int) -> Iterator[Lines]:
        """The records in pieces of at least so many bytes, the last one aside. Nothing is parsed.

        Raises:
            DataError: as `scan`, but for lines that are no JSON.
        """
        first: tuple[Place, int] | None = None
        with self.fetcher.open(self.stamp) as stream:
            for place, _, line_number in self._records(stream):
                if first is None:
                    first = place, line_number
                start, line = first
                if place.offset - start.offset >= num_bytes:
                    length = place.offset - start.offset
                    yield Lines(start.offset, length, start.number, line - 1)
                    first = place, line_number
        if first is not None:
            start, line = first
            yield Lines(start.offset, self.stamp.size - start.offset, start.number, line - 1)

    def _records(self, stream: BinaryIO) -> Iterator[tuple[Place, bytes, int]]:
        """The place of each record, its line (the end of it, where it is too long), and the number
        of that line, counted from 1."""
        most, own = self.caps.max_json_bytes, self.lines or Lines(0, self.stamp.size, 0, 0)
        number, offset, line_number = own.number, own.offset, own.lines_before
        end = own.offset + own.length
        while (self.lines is None or offset < end) and (line := stream.readline(most + 1)):
            if not offset:
                _refuse_wide(line, self.stamp)
            length = len(line)
            line_number += 1
            while not line.endswith(b"\n") and (more := stream.readline(READ_BYTES)):
                line, length = more, length + len(more)
            place = Place(number, offset, length)
            offset += length
            if length <= most and not line.strip():
                num_bytes, num_lines = _skip_blank_lines(stream)
                offset, line_number = offset + num_bytes, line_number + num_lines
                continue
            yield place, line, line_number
            number += 1
        if offset != end:
            raise integrity_error(
                f"{offset} bytes were read of a file of {self.stamp.size}: it changed meanwhile",
                shard=self.stamp.path,
            )


@dataclass(slots=True)
class JsonItems(TextFile):
    """The items of the list that one file is."""

    noun = "item"

    def scan(self) -> Generator[Record]:
        """See RecordFile."""
        with self.fetcher.open(self.stamp) as stream:
            yield from _ListReader(stream, self.stamp, self.caps.max_json_bytes).items()


@dataclass(eq=False)
class _ListReader:
    """Reads a list forward. `text[at:]` is what is left; `offset` is its first byte in the file."""

    stream: BinaryIO
    stamp: ShardStamp
    most: int

    def __post_init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.offset, self.ended = "", 0, 0, False

    def items(self) -> Iterator[Record]:
        """The records.

        Raises:
            DataError: the file is no list, or damaged.
        """
        self.more()
        if self.text.startswith("\ufeff"):
            self.move(1)
        if self.peek() != "[":
            raise self.not_a_list()
        self.move(1)
        number = 0
        while (mark := self.peek()) != "]":
            if number:
                if mark != ",":
                    raise self.damaged(f"expected ',' or ']' after item {number - 1}")
                self.move(1)
                self.peek()
            yield self.item(number)
            number += 1
        self.move(1)
        if self.peek():
            raise self.damaged("text behind the end of the list")

    def item(self, number: int) -> Record:
        """The item that begins here."""
        while True:
            try:
                _, end = _DECODER.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                too_long = len(self.text) - self.at > self.most
                if not too_long and self.more():
                    continue
                said = f"no end within {self.most} characters" if too_long else str(error)
                raise self.damaged(f"item {number} is no JSON: {said}") from None
            if end < len(self.text) or not self.more():
                break
        span = self.text[self.at : end].encode()
        place = Place(number, self.offset, len(span))
        self.move(end - self.at)
        if len(span) > self.most:
            return _too_long(place, self.most)
        return _parse_json(place, span)

    def peek(self) -> str:
        """The next character that is no space; none at the end of the file."""
        while True:
            space = _SPACE.match(self.text, self.at)
            assert space is not None
            self.move(space.end() - self.at)
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def move(self, characters: int) -> None:
        """Takes characters."""
        taken = self.text[self.at : self.at + characters]
        self.offset += len(taken) if taken.isascii() else len(taken.encode())
        self.at += characters

    def more(self) -> bool:
        """Reads on; as much again as is held, so that a long item is not tried too often."""
        if self.ended:
            return False
        data = self.stream.read(max(READ_BYTES, len(self.text) - self.at))
        self.ended = not data
        if not self.offset and not self.text:
            _refuse_wide(data, self.stamp)
        try:
            new = self.decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            raise self.damaged(f"no UTF-8 in what follows: {error.reason}") from None
        self.text, self.at = self.text[self.at :] + new, 0
        return True

    def damaged(self, reason: str) -> DataError:
        """Nothing behind it can be found."""
        cut = "; the file is damaged, or cut short" if self.ended else ""
        return integrity_error(
            f"{reason}{cut}; how many records are lost is unknown",
            shard=self.stamp.path,
            offset=self.offset,
        )

    def not_a_list(self) -> DataError:
        """The file holds something else."""
        try:
            what = kind_of(_DECODER.raw_decode(self.text, self.at)[0])
        except (ValueError, RecursionError):
            what = "a string" if self.text[self.at : self.at + 1] == '"' else "no list"
            what = "an object" if self.text[self.at : self.at + 1] == "{" else what
        hint = ""
        if what == "an object":
            hint = (
                "; records one a line are JSONL: name the file .jsonl. COCO: vlmpack data convert"
            )
        return schema_error(
            f"the file holds {what}; expected a list of records{hint}", shard=self.stamp.path
        )


def _parse_json(place: Place, span: bytes) -> Record:
    try:
        return as_record(place, parse_json(span.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        fault = schema_error(f"is no UTF-8: {error.reason} at byte {error.start} of it")
    except (ValueError, RecursionError) as error:
        fault = schema_error(f"is no JSON: {error}")
    return Record(place, None, fault)


@dataclass(slots=True)
class CsvRows(TextFile):
    """The rows of one file below its first."""

    noun = "row"

    delimiter: str = ","
    _names: list[str] = field(default_factory=list)
    _parted_by: str = ""

    def scan(self) -> Generator[Record]:
        """See RecordFile."""
        with self.fetcher.open(self.stamp) as stream:
            number = 0
            for offset, span in self._rows(stream):
                if not span.strip():
                    continue
                record = self._parse(Place(number, offset, len(span)), span)
                if record.fault is not None and not span.endswith(b"\n"):
                    what = f"row {number + 1}, which {record.fault.reason}"
                    raise _cut_short(self.stamp, what, "rows", offset)
                yield record
                number += 1

    def close(self) -> None:
        """See RecordFile."""
        self._names = []

    def _open(self) -> None:
        if not self._names:
            with self.fetcher.open(self.stamp) as stream:
                self._rows(stream)

    def _rows(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of each row below the first, whose names are taken."""
        rows = _csv_spans(stream, self.stamp, self.caps.max_json_bytes)
        self._names = self._header(next(rows, (0, b""))[1])
        return rows

    def _header(self, span: bytes) -> list[str]:
        self._parted_by = self._delimiter_of(span)
        names = self._cells(span, "the first row", self._parted_by)
        refuse_many_keys(names, self.stamp.path)
        twins = twice(names)
        if not names or not all(names) or twins:
            what = f"twice {twins[0]!r}" if twins else f"{names!r}"
            raise schema_error(
                f"the first row has {what[:200]}; expected the names of the columns, each once",
                shard=self.stamp.path,
            )
        return names

    def _delimiter_of(self, span: bytes) -> str:
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

    def _parse(self, place: Place, span: bytes) -> Record:
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
        return Record(place, {name: _cell_value(name, cell) for name, cell in named if cell != ""})


def _cell_value(name: str, cell: str) -> Any:
    """A list where the cell of such a column is JSON of one; else its text."""
    if cell[0] != "[" or name not in _TURNS | _LISTS:
        return cell
    try:
        value = parse_json(cell)
    except (ValueError, RecursionError):
        return cell
    is_turns = all(isinstance(item, dict) for item in value)
    return value if name in _LISTS or is_turns else cell


def _csv_spans(stream: BinaryIO, stamp: ShardStamp, most: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each row."""
    offset = 0
    lines: list[bytes] = []
    length = 0
    is_open = False
    while line := stream.readline(most + 1):
        if not offset and not lines:
            _refuse_wide(line, stamp)
        lines.append(line)
        length += len(line)
        is_open ^= line.count(b'"') % 2 == 1
        if length > most:
            raise integrity_error(
                f"a row of more than {most} bytes; a quote that is not closed runs on to here",
                shard=stamp.path,
                offset=offset,
            )
        if not is_open and line.endswith(b"\n"):
            row = b"".join(lines)
            yield offset, row
            offset, lines, length = offset + length, [], 0
            if not row.strip():
                offset += _skip_blank_lines(stream)[0]
    if is_open:
        raise _cut_short(stamp, "a quoted cell", "rows", offset)
    if lines:
        yield offset, b"".join(lines)


def _cut_short(stamp: ShardStamp, what: str, noun: str, offset: int) -> DataError:
    return integrity_error(
        f"the file ends inside of {what}; it is cut short, and how many {noun} are missing is "
        "unknown",
        shard=stamp.path,
        offset=offset,
    )


def _too_long(place: Place, most: int, line: int = 0) -> Record:
    fault = integrity_error(f"has {place.length} bytes; at most {most} are parsed")
    return Record(place, None, fault, line=line)


def _refuse_wide(head: bytes, stamp: ShardStamp) -> None:
    """Raise DataError (schema) where a file begins as no UTF-8 does."""
    if head.startswith(WIDE_TEXT) or b"\0" in head[:4]:
        raise schema_error(
            f"the file begins with {head[:4]!r}, as UTF-16 does; expected UTF-8: save it as such",
            shard=stamp.path,
        )


def _skip_blank_lines(stream: BinaryIO) -> tuple[int, int]:
    """Goes past the whole lines without text that come next, many at a time: (bytes, lines)."""
    num_bytes = num_lines = 0
    while ahead := cast(io.BufferedReader, stream).peek():
        end = _BLANK.match(ahead).end()  # type: ignore[union-attr]
        if not (end := ahead.rfind(b"\n", 0, end) + 1):
            break
        num_bytes, num_lines = num_bytes + end, num_lines + ahead.count(b"\n", 0, end)
        stream.read(end)
    return num_bytes, num_lines


def _read_spans(
    fetcher: Fetcher, stamp: ShardStamp, places: Sequence[Place]
) -> list[bytes | DataError]:
    """The bytes of records, in the order of their places; a store is asked for all together."""
    ranges = [(place.offset, place.length) for place in places]
    if is_remote(stamp.path):
        spans = or_error(fetcher.read_ranges, stamp, ranges)
        return [spans] * len(places) if isinstance(spans, DataError) else [*spans]
    return [or_error(fetcher.read, stamp, *span) for span in ranges]
