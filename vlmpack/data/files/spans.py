"""Records of a text file by their byte ranges; what cannot be read is an error in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlmpack.addresses import is_remote
from vlmpack.data.files.record import Place, Record
from vlmpack.errors import DataError
from vlmpack.storage.fetch import Fetcher, ShardStamp


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
