"""Byte ranges of records of one file, those that cannot be read as errors in their places."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpack.addresses import is_remote
from vlmpack.data.files.record import Place
from vlmpack.errors import DataError
from vlmpack.storage.fetch import Fetcher, ShardStamp


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
