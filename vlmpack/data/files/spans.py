"""Records of a text file by their byte ranges; what cannot be read is an error in its place."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import BinaryIO, cast

from vlmpack.addresses import is_remote
from vlmpack.data.files.record import Place, Record
from vlmpack.errors import DataError
from vlmpack.storage.fetch import Fetcher, ShardStamp

_BLANK = re.compile(rb"[ \t\n\r\v\f]*")


def skip_blank_lines(stream: BinaryIO) -> tuple[int, int]:
    """Goes past the whole lines without text that come next, many at a time: (bytes, lines)."""
    num_bytes = num_lines = 0
    while ahead := cast(io.BufferedReader, stream).peek():
        end = _BLANK.match(ahead).end()  # type: ignore[union-attr]
        if not (end := ahead.rfind(b"\n", 0, end) + 1):
            break
        num_bytes, num_lines = num_bytes + end, num_lines + ahead.count(b"\n", 0, end)
        stream.read(end)
    return num_bytes, num_lines


def read_texts(
    fetcher: Fetcher,
    stamp: ShardStamp,
    places: Sequence[Place],
    parse: Callable[[Place, bytes], Record],
) -> list[Record | DataError]:
    """The records at some places of a file, in that order.

    Args:
        parse: a record from its place and its bytes.
    """
    spans = read_spans(fetcher, stamp, places)
    return [
        span if isinstance(span, DataError) else parse(place, span)
        for place, span in zip(places, spans, strict=True)
    ]


def read_spans(
    fetcher: Fetcher, stamp: ShardStamp, places: Sequence[Place]
) -> list[bytes | DataError]:
    """The bytes of records, in the order of their places; a store is asked for all together."""
    ranges = [(place.offset, place.length) for place in places]
    if is_remote(stamp.path):
        try:
            return list(fetcher.read_ranges(stamp, ranges))
        except DataError as error:
            return [error] * len(places)
    found: list[bytes | DataError] = []
    for offset, length in ranges:
        try:
            found.append(fetcher.read(stamp, offset, length))
        except DataError as error:
            found.append(error)
    return found
