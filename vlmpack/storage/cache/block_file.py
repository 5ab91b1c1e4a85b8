"""One block's file: its bytes, a CRC-32 of every 8 KiB of them, and a seal over those.

The seal ties the checksums to the block's name and size. Whoever has seen it to be right may keep
the checksums: a part of the block is then read and verified without the file's end.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib

from vlmpack.storage.cache.blocks import Bytes

CHUNK_BYTES = 8 << 10
_SEAL_BYTES = 16


def write_all(descriptor: int, data: Bytes, tail: bytes) -> None:
    """A block's bytes and what follows them."""
    done, left = 0, len(data) + len(tail)
    while done < left:
        rest = [memoryview(data)[done:], memoryview(tail)[max(0, done - len(data)) :]]
        done += os.writev(descriptor, rest)


def tail_of(name: str, data: Bytes) -> bytes:
    """What follows a block's bytes in its file."""
    view = memoryview(data)
    sums = [zlib.crc32(view[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    packed = struct.pack(f"<{len(sums)}I", *sums)
    return packed + _seal(name, len(data), packed)


def _seal(name: str, size: int, packed: bytes) -> bytes:
    """Ties the checksums to the block's name, so that a file under a wrong name is no block."""
    text = f"{name}|{size}|{zlib.crc32(packed)}".encode()
    return hashlib.blake2b(text, digest_size=_SEAL_BYTES).digest()


def read_sums(descriptor: int, name: str, size: int) -> bytes | None:
    """The packed checksums of a block's chunks; None where the length or the seal is wrong."""
    tail_bytes = 4 * -(-size // CHUNK_BYTES) + _SEAL_BYTES
    if os.fstat(descriptor).st_size != size + tail_bytes:
        return None
    tail = os.pread(descriptor, tail_bytes, size)
    packed = tail[:-_SEAL_BYTES]
    if len(tail) != tail_bytes or tail[-_SEAL_BYTES:] != _seal(name, size, packed):
        return None
    return packed


def read_checked(descriptor: int, sums: bytes, size: int, begin: int, end: int) -> bytes | None:
    """Bytes `begin` to `end` of a block; None where some are missing or a checksum is wrong.

    Args:
        sums: the block's packed checksums.
        size: bytes of the whole block.
    """
    first, last = begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)
    start, stop = first * CHUNK_BYTES, min(last * CHUNK_BYTES, size)
    data = os.pread(descriptor, stop - start, start)
    if len(data) != stop - start:
        return None
    view = memoryview(data)
    for place, expected in enumerate(struct.unpack_from(f"<{last - first}I", sums, 4 * first)):
        if zlib.crc32(view[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]) != expected:
            return None
    return data[begin - start : end - start]
