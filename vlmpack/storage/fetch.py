"""One small interface to bytes, and its local implementation; `route` has the rest.

A fetcher is picklable: a worker receives it without open handles and opens its own. A reader names
the version of the shard that it wants, and other bytes from a store are an error. Local files are
read as they are, since copies on several machines differ in modification times. There the index's
checksum of each sample detects changes.
"""

from __future__ import annotations

import io
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from vlmpack.addresses import is_remote, record_kind
from vlmpack.errors import DataError, integrity_error, refuse_full_table, transport_error
from vlmpack.whole_file import open_regular, refuse_irregular

READ_BUFFER_BYTES = 1 << 20
HEADS_AT_ONCE = 16

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardStamp:
    """What identifies one version of a shard, without reading it."""

    path: str
    size: int
    version: str
    """Local files: the modification time in nanoseconds. Object stores: the ETag."""
    pin: str = field(default="", compare=False)
    """On the hub, the commit at which the shard was looked at. Another commit with the same bytes
    is the same version."""
    form: str = field(default="", compare=False)
    """How the records of a file, or samples of a shard without turns, are read; text of the data
    layer."""

    @property
    def holds_records(self) -> bool:
        """Whether this is a file of records, and no shard."""
        return bool(self.form) and record_kind(self.path) is not None


class Fetcher(Protocol):
    """Reads shards. Every failure is a DataError that names the shard."""

    def head(self, path: str) -> ShardStamp:
        """The shard's size and version.

        Raises:
            DataError: class `transport` where the shard cannot be reached.
        """

    def open(self, stamp: ShardStamp) -> BinaryIO:
        """The whole shard as a stream, for the index.

        Raises:
            DataError: class `transport`.
        """

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`.

        Raises:
            DataError: class `transport`, or `integrity` where the shard ends too early.
        """

    def read_ranges(self, stamp: ShardStamp, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several (offset, length) of one shard, in the order asked for; at once where that pays.

        Raises:
            DataError: as `read`.
        """

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """The shards in a folder of a store, at any depth. `prefix` ends with '/'.

        Raises:
            DataError: class `transport`, also where the store cannot list.
        """


def stamp_shards(fetcher: Fetcher, paths: Sequence[str]) -> list[ShardStamp]:
    """The stamps of many shards, in order; those in stores are requested at once.

    Raises:
        DataError: the first shard in order that cannot be reached.
    """
    if not any(is_remote(path) for path in paths):
        return [fetcher.head(path) for path in paths]
    return at_once(fetcher.head, paths, most=HEADS_AT_ONCE)


def at_once(call: Callable[[S], T], items: Sequence[S], *, most: int) -> list[T]:
    """The results of a call on each item, in order, on at most `most` threads. After an error no
    new call starts."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(len(items), most)) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class ChunkStream(io.RawIOBase):
    """Chunks as a file. A finished chunk is freed before the next is requested."""

    def __init__(self, chunks: Generator[bytes | memoryview]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """See io.RawIOBase: always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the buffer up to the end of a chunk; 0 at the end of the file."""
        while not self._rest:
            self._rest = memoryview(b"")
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        """Ends whatever makes the chunks."""
        self._chunks.close()
        super().close()


def most_open_files(wished: int) -> int:
    """How many files to keep open: a small part of the limit, since torch and its loader processes
    need the rest."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wished if most == resource.RLIM_INFINITY else max(1, min(wished, most // 16))


def _unreachable(path: str, error: OSError | ValueError) -> DataError:
    refuse_full_table(error)
    reason = getattr(error, "strerror", None) or str(error)
    return transport_error(f"cannot be read: {reason}", shard=path)


@dataclass(slots=True)
class LocalFetcher:
    """Files on this machine's file systems. Of the open ones the least recently used is closed
    first."""

    max_open_files: int = field(default_factory=lambda: most_open_files(64))
    _descriptors: OrderedDict[str, int] = field(default_factory=OrderedDict, repr=False)

    def head(self, path: str) -> ShardStamp:
        """See Fetcher."""
        try:
            status = Path(path).stat()
            refuse_irregular(status.st_mode, path)
        except (OSError, ValueError) as error:  # no path has a null character
            raise _unreachable(path, error) from error
        return ShardStamp(path, status.st_size, str(status.st_mtime_ns))

    def open(self, stamp: ShardStamp) -> BinaryIO:
        """See Fetcher."""
        path = stamp.path
        try:
            return open_regular(path, READ_BUFFER_BYTES)
        except OSError as error:
            raise _unreachable(path, error) from error

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        """See Fetcher."""
        path = stamp.path
        try:
            chunks: list[bytes] = []
            missing = length
            while missing:
                chunk = os.pread(self._descriptor(path), missing, offset + length - missing)
                if not chunk:
                    break
                chunks.append(chunk)
                missing -= len(chunk)
        except OSError as error:
            raise _unreachable(path, error) from error
        if missing:
            raise integrity_error(
                f"the shard ends {missing} bytes before the end of the sample. It was shortened "
                f"after it was indexed ({length - missing} of {length} bytes found)",
                shard=path,
                offset=offset,
            )
        return b"".join(chunks)

    def read_ranges(self, stamp: ShardStamp, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See Fetcher."""
        return [self.read(stamp, offset, length) for offset, length in ranges]

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """See Fetcher."""
        return [self.head(str(path)) for path in sorted(Path(prefix).rglob("*")) if path.is_file()]

    def close(self) -> None:
        """Closes every open file; the next read opens again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _descriptor(self, path: str) -> int:
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            while len(self._descriptors) >= self.max_open_files:
                os.close(self._descriptors.popitem(last=False)[1])
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._descriptors[path] = descriptor
        else:
            self._descriptors.move_to_end(path)
        return descriptor

    def __reduce__(self) -> tuple[type[LocalFetcher], tuple[int]]:
        return LocalFetcher, (self.max_open_files,)

    def __del__(self) -> None:
        self.close()
