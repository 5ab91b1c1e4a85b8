"""JSON: a list of records in one file, as LLaVA's; each is found again by its byte range.

The list is parsed item by item, so that of a file of any size one item is in memory at a time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from vlmpack.data.files.json_lines import refuse_wide
from vlmpack.data.files.record import Place, Record, as_record
from vlmpack.data.files.spans import read_texts
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.json_text import parse_json
from vlmpack.errors import DataError, schema_error
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import kind_of

READ_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(slots=True)
class JsonItems:
    """The items of the list that one file is."""

    fetcher: Fetcher
    stamp: ShardStamp
    caps: SampleCaps
    noun: str = "item"

    def scan(self) -> Iterator[Record]:
        """See RecordFile."""
        with self.fetcher.open(self.stamp) as stream:
            yield from _ListReader(stream, self.stamp, self.caps.max_json_bytes).items()

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        return read_texts(self.fetcher, self.stamp, places, _parsed)

    def close(self) -> None:
        """See RecordFile: nothing is kept."""


class _ListReader:
    """Reads a list forward: `text` from `at` on is what is not taken yet, `offset` its first byte
    in the file."""

    def __init__(self, stream: BinaryIO, stamp: ShardStamp, most: int) -> None:
        self.stream = stream
        self.stamp = stamp
        self.most = most
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""
        self.at = 0
        self.offset = 0
        self.ended = False

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
            reason = f"has {len(span)} bytes; at most {self.most} are parsed"
            return Record(place, None, DataError(reason, error_class="integrity"))
        return _parsed(place, span)

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
            refuse_wide(data, self.stamp)
        try:
            new = self.decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            raise self.damaged(f"no UTF-8 in what follows: {error.reason}") from None
        self.text, self.at = self.text[self.at :] + new, 0
        return True

    def damaged(self, reason: str) -> DataError:
        """Nothing behind it can be found."""
        cut = "; the file is damaged, or cut short" if self.ended else ""
        return DataError(
            f"{reason}{cut}; how many records are lost is unknown",
            error_class="integrity",
            shard=self.stamp.path,
            offset=self.offset,
        )

    def not_a_list(self) -> DataError:
        """The file holds something else."""
        try:
            found = kind_of(_DECODER.raw_decode(self.text, self.at)[0])
        except (ValueError, RecursionError):
            found = "a string" if self.text[self.at : self.at + 1] == '"' else "no list"
            found = "an object" if self.text[self.at : self.at + 1] == "{" else found
        hint = (
            "; records one a line are JSONL: name the file .jsonl" if found == "an object" else ""
        )
        return schema_error(
            f"the file holds {found}; expected a list of records{hint}", shard=self.stamp.path
        )


def _parsed(place: Place, span: bytes) -> Record:
    try:
        return as_record(place, parse_json(span.decode()))
    except (ValueError, RecursionError) as error:
        return Record(place, None, schema_error(f"is no JSON: {error}"))
