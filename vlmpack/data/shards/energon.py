"""Energon's index beside a shard: read, and checked against what we found ourselves.

`shard.tar.idx` holds little-endian uint64 numbers: the offset of every sample's first header, then
the offset behind the last member. Our own index needs checksums and image sizes, so it still reads
the shard; Energon's says what another tool saw there, and must say the same.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any

from vlmpack.addresses import is_remote
from vlmpack.errors import DataError
from vlmpack.storage.fetch import Fetcher, ShardStamp

SUFFIX = ".idx"
ENTRY_BYTES = 8


def energon_path(shard: str) -> str | None:
    """Where Energon's index of a shard lies; None for names that it does not index."""
    return shard + SUFFIX if shard.endswith(".tar") else None


def read_energon_index(fetcher: Fetcher, stamp: ShardStamp) -> list[int]:
    """The offsets of an index file, the end included.

    Raises:
        DataError: class `transport`, or `integrity` for a file that is no such index.
    """
    if stamp.size == 0 or stamp.size % ENTRY_BYTES:
        raise DataError(
            f"has {stamp.size} bytes; expected {ENTRY_BYTES} for every sample and for the end",
            error_class="integrity",
            shard=stamp.path,
        )
    offsets = array("Q")
    offsets.frombytes(fetcher.read(stamp, 0, stamp.size))
    if sys.byteorder == "big":
        offsets.byteswap()
    return offsets.tolist()


def find_energon_index(fetcher: Fetcher, shard: str) -> ShardStamp | None:
    """The index file beside a shard, if there is one.

    A store answers in many ways for a file that is not there, so a remote one that cannot be had
    counts as absent: the check is a second opinion, and the shard itself was just read.

    Raises:
        DataError: class `transport`, for a local file that cannot be read.
    """
    path = energon_path(shard)
    if path is None or (not is_remote(path) and not Path(path).is_file()):
        return None
    try:
        return fetcher.head(path)
    except DataError:
        if is_remote(path):
            return None
        raise


def check_energon_index(fetcher: Fetcher, stamp: ShardStamp, table: Any) -> bool:
    """Compare Energon's index with ours, where there is one.

    Args:
        stamp: the shard.
        table: our index of it.

    Returns:
        Whether there was one.

    Raises:
        DataError: class `integrity`, with the first sample on which the two differ.
    """
    found = find_energon_index(fetcher, stamp.path)
    if found is None:
        return False
    theirs = read_energon_index(fetcher, found)
    starts = table.column("offset").to_pylist()
    lengths = table.column("length").to_pylist()
    keys = table.column("key")
    end = starts[-1] + lengths[-1] if starts else 0
    *their_starts, their_end = theirs
    for place, (ours, other) in enumerate(zip(starts, their_starts, strict=False)):
        if ours != other:
            raise _disagreement(
                stamp,
                f"its sample {place} begins at byte {other}, the shard's ({keys[place]}) at {ours}",
                offset=ours,
            )
    if len(their_starts) != len(starts):
        raise _disagreement(stamp, f"it has {len(their_starts)} samples, the shard {len(starts)}")
    if not end <= their_end <= stamp.size:
        raise _disagreement(stamp, f"it ends at byte {their_end}, the shard's samples at {end}")
    return True


def _disagreement(stamp: ShardStamp, reason: str, offset: int | None = None) -> DataError:
    return DataError(
        f"Energon's index {Path(stamp.path).name}{SUFFIX} does not fit the shard: {reason}; one of "
        "them was changed without the other",
        error_class="integrity",
        shard=stamp.path,
        offset=offset,
    )
