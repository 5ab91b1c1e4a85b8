"""JSONL: a record a line, found again by its byte range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vlmpack.data.files.record import Place, Record, as_record
from vlmpack.data.files.spans import read_texts, skip_blank_lines
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.json_text import parse_json
from vlmpack.errors import DataError, schema_error
from vlmpack.storage.fetch import Fetcher, ShardStamp

WIDE_TEXT = (b"\xff\xfe", b"\xfe\xff")
"""How UTF-16 and UTF-32 begin."""
_SKIPPED_BYTES = 1 << 20


@dataclass(slots=True)
class JsonLines:
    """The lines of one file; those without text are none."""

    fetcher: Fetcher
    stamp: ShardStamp
    caps: SampleCaps
    noun: str = "line"

    def scan(self) -> Iterator[Record]:
        """See RecordFile.

        Raises:
            DataError: class `integrity` where the file ends inside of a line, else as there.
        """
        most = self.caps.max_json_bytes
        number = offset = line_number = 0
        with self.fetcher.open(self.stamp) as stream:
            while line := stream.readline(most + 1):
                if not offset:
                    refuse_wide(line, self.stamp)
                length = len(line)
                line_number += 1
                while not line.endswith(b"\n") and (more := stream.readline(_SKIPPED_BYTES)):
                    line, length = more, length + len(more)
                place = Place(number, offset, length)
                offset += length
                if length > most:
                    reason = f"has {length} bytes; at most {most} are parsed"
                    fault = DataError(reason, error_class="integrity")
                    yield Record(place, None, fault, line=line_number)
                elif not line.strip():
                    num_bytes, num_lines = skip_blank_lines(stream)
                    offset, line_number = offset + num_bytes, line_number + num_lines
                    continue
                else:
                    record = replace(_parsed(place, line), line=line_number)
                    if record.fault is not None and not line.endswith(b"\n"):
                        raise DataError(
                            f"the file ends inside of line {line_number}, which is no JSON; it is "
                            "cut short, and how many records are missing is unknown",
                            error_class="integrity",
                            shard=self.stamp.path,
                            offset=place.offset,
                        )
                    yield record
                number += 1
        self._check_size(offset)

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        return read_texts(self.fetcher, self.stamp, places, _parsed)

    def close(self) -> None:
        """See RecordFile: nothing is kept."""

    def _check_size(self, found: int) -> None:
        if found != self.stamp.size:
            raise DataError(
                f"{found} bytes were read of a file of {self.stamp.size}: it changed meanwhile",
                error_class="integrity",
                shard=self.stamp.path,
            )


def refuse_wide(begin: bytes, stamp: ShardStamp) -> None:
    """Raise DataError (schema) where a file begins as no UTF-8 does."""
    if begin.startswith(WIDE_TEXT) or b"\0" in begin[:4]:
        raise schema_error(
            f"the file begins with {begin[:4]!r}, as UTF-16 does; expected UTF-8: save it as such",
            shard=stamp.path,
        )


def _parsed(place: Place, line: bytes) -> Record:
    try:
        return as_record(place, parse_json(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        fault = schema_error(f"is no UTF-8: {error.reason} at byte {error.start} of it")
    except (ValueError, RecursionError) as error:
        fault = schema_error(f"is no JSON: {error}")
    return Record(place, None, fault)
