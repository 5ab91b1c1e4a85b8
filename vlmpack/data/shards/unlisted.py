"""Samples of a shard that its index lacks, found by reading the gaps between indexed samples.

    | sample | sample |   ?   | sample | sample |   ?        00 00 |
              of the index, by offset and length                 the archive's end

Training compares each sample with the index's checksum. So only the gaps and the end need a look:
in most shards the archive's end alone.
"""

from __future__ import annotations

import io
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from vlmpack.data.shards.tar import read_part_headers
from vlmpack.errors import integrity_error
from vlmpack.storage.fetch import Fetcher, ShardStamp

READ_BYTES = 256 << 10

Int64s = npt.NDArray[np.int64]


def unlisted_samples(
    fetcher: Fetcher, stamp: ShardStamp, offsets: Int64s, lengths: Int64s
) -> list[str]:
    """Keys of the samples outside the spans that an index lists in file order, in that order.

    Raises:
        DataError: the shard cannot be read; or it is not made of these spans and whole members, so
            that the index is not of this shard.
    """
    starts = np.concatenate((offsets, [stamp.size]))
    ends = np.concatenate(([0], offsets + lengths))
    if (wrong := np.flatnonzero(starts < ends)).size:
        raise integrity_error(
            f"the index has samples that overlap, or lie behind the shard's {stamp.size} bytes; it "
            "is not of this shard",
            shard=stamp.path,
            offset=int(starts[wrong[0]]),
        )
    keys: list[str] = []
    last = offsets.shape[0]
    for place in np.flatnonzero((starts > ends) | (np.arange(last + 1) == last)).tolist():
        start, end = int(ends[place]), int(starts[place])
        stream = io.BufferedReader(_Span(fetcher, stamp, start, end), READ_BYTES)
        members = read_part_headers(
            stream, end - start, shard=stamp.path, base=start, is_end=place == last
        )
        keys += [key for key, _ in groupby(members, attrgetter("key"))]
    return keys


class _Span(io.RawIOBase):
    """Bytes `start` to `end` of a shard as a stream."""

    def __init__(self, fetcher: Fetcher, stamp: ShardStamp, start: int, end: int) -> None:
        self._fetcher = fetcher
        self._stamp = stamp
        self._position = start
        self._end = end

    def readable(self) -> bool:
        """See io.RawIOBase: always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the buffer; 0 at the end."""
        count = min(len(buffer), self._end - self._position)
        if count:
            buffer[:count] = self._fetcher.read(self._stamp, self._position, count)
        self._position += count
        return count
