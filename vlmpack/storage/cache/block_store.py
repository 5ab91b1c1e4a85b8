"""Blocks of shards on a local disk: one file each, checked on every read, bounded in sum.

    a range    offset ......... offset + length
    blocks  |    0    |    1    |    2    |  3 |      the last one is shorter
    spans         [begin, end of 0] [all of 1] [begin, end of 2]

    <directory>/blocks/ab/ab3f...   the block's bytes, a CRC-32 of every 8 KiB of them, a seal
    <directory>/incoming/           files that are being written; they appear by rename
    <directory>/locks/              who fetches what; the sum of all sizes is in `locks/size`, and
                                    `locks/counted` was touched when it was last counted

Any number of processes share a directory. A block that was cut, flipped or half written does not
match its checksums and is removed. So nothing is synced to disk. A kill leaves at most a file in
`incoming`, which is removed when it is an hour old. Reads touch a block, and the blocks touched
longest ago go when the sum would pass the bound.

The seal ties the checksums to the block's name and size. A process that verified it may keep the
checksums, and then reads parts of the block without the file's end.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import re
import socket
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vlmpack.storage.fetch import ShardStamp

BLOCK_RULE = "vlmpack_format 1"
Bytes = bytes | memoryview
CHUNK_BYTES = 8 << 10
_SEAL_BYTES = 16
logger = logging.getLogger("vlmpack")
STALE_SECONDS = 3600.0
COUNTED_SECONDS = 60.0
"""A count of all blocks serves the processes that start in this time. It takes 1 s for 1 TB."""
KEPT_AFTER_EVICTION = 0.9
SIZE_LOCK_SECONDS = 10.0
MAX_SUMS = 256
"""Blocks whose checksums stay in memory; 2 KiB each at 4 MiB a block."""
PRIVATE, SHARED = 0o700, 0o770
"""Modes of folders; files are not executable. Shards may be private, so a cache is its user's own,
unless its folder is group-writable."""
_LOCK_FILES = 1024
_BLOCK = re.compile("[0-9a-f]{32}")
"""The name of a block; in `incoming` more follows."""


class Span(NamedTuple):
    """A part of one block."""

    block: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardBlocks:
    """The blocks of one version of a shard, all of `block_bytes` but the last."""

    stamp: ShardStamp
    block_bytes: int

    @property
    def count(self) -> int:
        """Blocks of the shard."""
        return -(-self.stamp.size // self.block_bytes)

    def size(self, block: int) -> int:
        """Bytes of a block."""
        return min(self.block_bytes, self.stamp.size - block * self.block_bytes)

    def name(self, block: int) -> str:
        """32 hexadecimal digits: path, version, size and place, so nothing else has this name."""
        stamp = self.stamp
        place = (BLOCK_RULE, stamp.path, stamp.version, stamp.size, self.block_bytes, block)
        return hashlib.blake2b(repr(place).encode(), digest_size=16).hexdigest()

    def spans(self, offset: int, length: int) -> list[Span]:
        """The slices of blocks that make up a range of the shard, in order."""
        if not length:
            return []
        size, end = self.block_bytes, offset + length
        return [
            Span(block, max(offset - block * size, 0), min(end - block * size, size))
            for block in range(offset // size, -(-end // size))
        ]

    def range_of(self, span: Span) -> tuple[int, int]:
        """(offset, length) of a span in the shard."""
        return span.block * self.block_bytes + span.start, span.end - span.start

    def range_of_run(self, run: list[int]) -> tuple[int, int]:
        """(offset, length) of neighbouring blocks."""
        return run[0] * self.block_bytes, sum(self.size(block) for block in run)


def runs(blocks: Iterable[int]) -> Iterator[list[int]]:
    """Neighbours together: 1 2 3 7 8 -> [1 2 3] [7 8]."""
    run: list[int] = []
    for block in blocks:
        if run and block != run[-1] + 1:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def write_all(descriptor: int, data: Bytes, tail: bytes) -> None:
    """A block's bytes and what follows them."""
    done, remaining = 0, len(data) + len(tail)
    while done < remaining:
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


def read_checked(descriptor: int, sums: bytes, size: int, start: int, end: int) -> bytes | None:
    """Bytes `start` to `end` of a block, checked by its packed checksums; None where missing or
    wrong."""
    first, last = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
    base, stop = first * CHUNK_BYTES, min(last * CHUNK_BYTES, size)
    data = os.pread(descriptor, stop - base, base)
    if len(data) != stop - base:
        return None
    view = memoryview(data)
    for place, expected in enumerate(struct.unpack_from(f"<{last - first}I", sums, 4 * first)):
        if zlib.crc32(view[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]) != expected:
            return None
    return data[start - base : end - base]


@dataclass(slots=True)
class BlockStore:
    """The blocks in one directory; picklable.

    Args:
        max_bytes: bound of all block files together, checksums included, without the files in
            `incoming` (one per writing process).
    """

    directory: Path
    max_bytes: int
    damaged: int = field(default=0, init=False)
    """Blocks that this process found damaged and removed."""
    _ready: bool = field(default=False, init=False, repr=False)
    _has_warned: bool = field(default=False, init=False, repr=False)
    _mode: int = field(default=PRIVATE, init=False, repr=False)
    _serial: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False)
    _sums: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)
    """Packed checksums of blocks whose seal was found good."""

    def read(self, name: str, size: int, start: int, end: int) -> bytes | None:
        """Bytes `start` to `end` of a block, verified; None where it is missing or damaged."""
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY)  # every sample comes by here: no Path
        except OSError:
            return None
        try:
            data = self._read_verified(descriptor, name, size, start, end)
        except OSError as error:
            logger.warning("the cached block %s cannot be read: %s", path, error)
            data = None
        else:
            if data is not None:
                with contextlib.suppress(OSError):  # another user's block is as good
                    os.utime(descriptor)
        finally:
            os.close(descriptor)
        if data is None:
            self._drop_damaged(path)
        return data

    def _read_verified(
        self, descriptor: int, name: str, size: int, start: int, end: int
    ) -> bytes | None:
        """The bytes, or None where a length or a checksum is wrong."""
        sums = self._sums.get(name) or read_sums(descriptor, name, size)
        if sums is None:
            return None
        if len(self._sums) >= MAX_SUMS:
            self._sums.pop(next(iter(self._sums)), None)
        self._sums[name] = sums
        return read_checked(descriptor, sums, size, start, end)

    def has(self, name: str) -> bool:
        """Whether there is a file for the block, good or not."""
        return os.path.exists(self._path(name))  # noqa: PTH110

    def write(self, name: str, data: Bytes) -> bool:
        """Keeps a block, and makes room for it first.

        Returns:
            False where it could not be kept: the disk is full or gone. Training goes on without.
        """
        tail = tail_of(name, data)
        if len(data) + len(tail) > self.max_bytes:
            return False
        path = Path(self._path(name))
        writer = f"{socket.gethostname()}-{os.getpid()}-{next(self._serial)}"
        temporary = self.directory / "incoming" / f"{name}.{writer}"
        try:
            self._prepare()
            path.parent.mkdir(mode=self._mode, exist_ok=True)
            new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            descriptor = os.open(temporary, new, self._mode & 0o666)
            try:
                write_all(descriptor, data, tail)
            finally:
                os.close(descriptor)
            with self._size_lock() as total:
                self._publish(temporary, path, total)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "cannot keep a block in %s: %s; what does not fit is fetched again each time, "
                    "and this is said once",
                    self.directory,
                    error,
                )
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False
        return True

    @contextlib.contextmanager
    def fetching(self, names: Iterable[str], *, timeout_seconds: float) -> Iterator[None]:
        """Held by the one process that fetches these blocks.

        The locks die with their process. After the timeout the block is entered all the same, since
        a block fetched twice only wastes time. Blocks share lock files, so unrelated ones may wait
        for each other.
        """
        places = sorted({int(name[:8], 16) % _LOCK_FILES for name in names})
        deadline = time.monotonic() + timeout_seconds
        with contextlib.ExitStack() as held:
            for place in places:
                path = self.directory / "locks" / f"{place:04d}"
                with contextlib.suppress(OSError):  # no directory, no locks: fetched all the same
                    self._prepare()
                    held.enter_context(_locked(path, deadline, self._mode))
            yield

    def total_bytes(self) -> int:
        """Bytes of all block files, counted."""
        return sum(size for _, size, _ in self._scan())

    def _path(self, name: str) -> str:
        return f"{self.directory}/blocks/{name[:2]}/{name}"

    def _prepare(self) -> None:
        """Makes the folders, and sweeps up what killed processes left; once per process."""
        if self._ready:
            return
        make_folder(self.directory)
        self._mode = SHARED if self.directory.stat().st_mode & stat.S_IWGRP else PRIVATE
        for folder in ("blocks", "incoming", "locks"):
            (self.directory / folder).mkdir(mode=self._mode, exist_ok=True)
        oldest = time.time() - STALE_SECONDS
        for entry in list(os.scandir(self.directory / "incoming")):
            with contextlib.suppress(OSError):
                if _BLOCK.match(entry.name) and entry.stat().st_mtime < oldest:
                    Path(entry.path).unlink()
        self._ready = True
        counted = self.directory / "locks" / "counted"
        with self._size_lock() as total:
            age = time.time() - counted.stat().st_mtime if counted.exists() else -1.0
            if not 0 <= age < COUNTED_SECONDS:
                total.set(self.total_bytes())
                counted.touch(self._mode & 0o666)

    def _publish(self, temporary: Path, path: Path, total: _Total) -> None:
        size = temporary.stat().st_size
        if total.get() + size > self.max_bytes:
            total.set(self._evict(room_for=size))
        with contextlib.suppress(OSError):
            size -= path.stat().st_size  # it replaces a block that another process kept meanwhile
        temporary.replace(path)
        total.set(total.get() + size)

    def _evict(self, *, room_for: int) -> int:
        """Removes the blocks touched longest ago; returns the bytes of those that stay."""
        files = sorted(self._scan())
        remaining = sum(size for _, size, _ in files)
        allowed = min(int(self.max_bytes * KEPT_AFTER_EVICTION), self.max_bytes - room_for)
        for _, size, path in files:
            if remaining <= allowed:
                break
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
            remaining -= size
        return remaining

    def _scan(self) -> list[tuple[int, int, str]]:
        """(time of last use in ns, bytes, path) of every block; files that vanish are passed by."""
        files = []
        with contextlib.suppress(FileNotFoundError):
            for folder in list(os.scandir(self.directory / "blocks")):
                for entry in list(os.scandir(folder.path)) if folder.is_dir() else ():
                    if not _BLOCK.fullmatch(entry.name):
                        continue  # somebody else's, in a folder that he named
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
        return files

    def _drop_damaged(self, path: str) -> None:
        self.damaged += 1
        self._sums.pop(path.rpartition("/")[2], None)
        logger.warning("the cached block %s was damaged; it is fetched again", path)
        with contextlib.suppress(OSError):
            Path(path).unlink()

    @contextlib.contextmanager
    def _size_lock(self) -> Iterator[_Total]:
        path = self.directory / "locks" / "size"
        with _locked(path, time.monotonic() + SIZE_LOCK_SECONDS, self._mode) as descriptor:
            yield _Total(descriptor)

    def __reduce__(self) -> tuple[type[BlockStore], tuple[Path, int]]:
        return BlockStore, (self.directory, self.max_bytes)


@dataclass(frozen=True, slots=True)
class _Total:
    """The sum of all sizes, as text in the file that is locked.

    Removed blocks and writers killed between rename and sum make it slightly wrong. Every eviction
    counts anew, and so does a new process, unless one has in the last minute.
    """

    descriptor: int

    def get(self) -> int:
        text = os.pread(self.descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else 0

    def set(self, total: int) -> None:
        os.pwrite(self.descriptor, f"{max(0, total):<31d}\n".encode(), 0)


def make_folder(folder: Path) -> None:
    """Makes a cache's folder, if it is missing, for this user alone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE, exist_ok=True)


@contextlib.contextmanager
def _locked(path: Path, deadline: float, mode: int) -> Iterator[int]:
    """Hold a lock file and yield its descriptor, or give up waiting at the deadline."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode & 0o666)
    pause = 0.001
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            except OSError:
                break  # a file system without locks: the bound is then kept per process
        yield descriptor
    finally:
        os.close(descriptor)
