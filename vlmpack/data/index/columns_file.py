"""Columns of many samples in one sealed file, of which a reader reads what it asks for.

    blobs        values of one column over CHUNK samples, in the narrowest type that holds them
    directory    JSON: each blob's place, type and CRC-32, and facts about the whole
    seal         the directory's length, and BLAKE2b-128 of the file's name and the directory

All processes of a node read one file, by offset. The kernel keeps its pages once for all of them,
and no process keeps what it read. A memory map would do the same, but a file that is cut while it
is mapped kills the process (SIGBUS). Here it is an error with the file's name.

A blob's checksum is compared when a process first reads from it. The file is a copy of index parts
and is named after them. So a damaged one is removed, and the next launch makes it again.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from vlmpack.data.index.parts import SEAL_BYTES, seal
from vlmpack.errors import DataError, integrity_error, refuse_full_table, transport_error
from vlmpack.file_format import FORMAT, INDEX

Int64s = npt.NDArray[np.int64]

CHUNK = 1 << 18
"""Samples of a chunk: 1 MiB of a column of four bytes."""

_END_BYTES = 8 + SEAL_BYTES

logger = logging.getLogger("vlmpack")


def runs(start: int, stop: int) -> Iterator[slice]:
    """The samples from `start` to `stop`, at most CHUNK at a time."""
    for first in range(start, stop, CHUNK):
        yield slice(first, min(first + CHUNK, stop))


class Numbers(Protocol):
    """Whole numbers, one a sample: an array, or a Column."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N,)"""

    def __getitem__(self, where: Any, /) -> Any:
        """Those of some places, as int64: a place, a slice without a step, places, or a mask."""


class ColumnsWriter:
    """Writes a file chunk by chunk, with the memory of one.

    Args:
        name: of the file, to which the seal ties its content.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self._end = self._rows = 0
        self._chunks: list[dict[str, Any]] = []

    def add(self, numbers: Mapping[str, Int64s], texts: Mapping[str, Any]) -> None:
        """The next CHUNK samples, or the last ones: columns of numbers, and pyarrow arrays of
        strings without nulls."""
        chunk = {name: self.numbers(values) for name, values in numbers.items()}
        for name, strings in texts.items():
            places, data = strings.buffers()[1:]
            ends = np.frombuffer(places, np.int32)[strings.offset :][: len(strings) + 1]
            first, last = (int(ends[0]), int(ends[-1])) if ends.size else (0, 0)
            text = memoryview(data or b"")[first:last]
            chunk[name] = [self.numbers(ends[1:] - np.int64(first)), self._blob(text)]
            self._rows += len(strings) if name == "key" else 0
        self._chunks.append(chunk)

    def numbers(self, values: npt.NDArray[Any]) -> Any:
        """Writes numbers and returns where they are. Equal ones take no room."""
        low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
        if low == high:
            return low
        kind = np.dtype(np.int64) if low < 0 else np.min_scalar_type(high)
        return [*self._blob(values.astype(kind).data.cast("B")), kind.str]

    def _blob(self, data: memoryview) -> list[Any]:
        self._stream.write(data)
        self._end += len(data)
        return [self._end - len(data), len(data), zlib.crc32(data)]

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Writes the directory and the seal."""
        sizes = {"rows": self._rows, "chunk": CHUNK, "chunks": self._chunks}
        directory = {FORMAT: INDEX.number, **sizes, **facts}
        data = json.dumps(directory, separators=(",", ":")).encode()
        self._stream.write(data + len(data).to_bytes(8, "little") + seal(self._name, data))


TOUCH_SECONDS = 3600
"""A process that reads a table says so at this interval, by the time of the file."""


Read = Callable[[int, int], bytes]
"""Called with an offset and a length; returns fewer bytes behind the end."""


class ColumnsFile:
    """A file as its readers have it.

    Args:
        path: where it lies; None for one in memory.
        inode: of the file that is read, since another may take its name.

    Raises:
        ValueError, LookupError: it is not as it was written, or not of this form.
    """

    def __init__(
        self, read: Read, size: int, name: str, path: Path | None = None, inode: int = 0
    ) -> None:
        self._read, self._size, self.path, self._inode = read, size, path, inode
        self._touched = time.monotonic()
        end = read(size - _END_BYTES, _END_BYTES) if size >= _END_BYTES else b""
        length = int.from_bytes(end[:8], "little")
        start = size - _END_BYTES - length
        directory = read(start, length) if end and start >= 0 else b""
        if not end or end[8:] != seal(name, directory):
            raise ValueError(f"the directory of {name} is not as it was written")
        self.facts: dict[str, Any] = json.loads(directory)
        self.num_rows: int = self.facts["rows"]
        self.chunk: int = self.facts["chunk"]
        self._chunks: list[dict[str, Any]] = self.facts.pop("chunks")
        self._checked: set[int] = set()

    def __reduce__(self) -> Any:
        raise TypeError("a table stays in its process, since it reads by an open file")

    def remove(self) -> None:
        """Remove the file, unless another one has its name."""
        if self.path is not None:
            _remove(self.path, self._inode)

    def keep_in_memory(self) -> None:
        """Reads all of it, once, and compares every blob with its checksum.

        Raises:
            DataError: class `integrity`, or `transport` where it cannot be read.
        """
        data = memoryview(self._take(0, self._size))
        self._read = lambda offset, length: bytes(data[offset:][:length])
        self.check()

    def has(self, name: str, unless: int | None = None) -> bool:
        """Whether a chunk has a column, and other values there than `unless`."""
        return any(chunk.get(name, unless) != unless for chunk in self._chunks)

    def column(self, name: str, default: int) -> Column:
        """A column; chunks without it have the default."""
        return Column(self, name, default)

    def rows(self, name: str, default: int, chunk: int, first: int, stop: int) -> Int64s:
        """A column's values in a part of a chunk."""
        return self.numbers(self._chunks[chunk].get(name, default), first, stop)

    def numbers(self, entry: Any, first: int, stop: int) -> Int64s:
        """Some of the numbers that `ColumnsWriter.numbers` wrote.

        Raises:
            DataError: class `integrity`.
        """
        if isinstance(entry, int):
            return np.full(stop - first, entry, dtype=np.int64)
        kind = np.dtype(entry[3])
        data = self._bytes(entry, first * kind.itemsize, stop * kind.itemsize)
        return np.frombuffer(data, kind).astype(np.int64)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(chunk, first, stop inside it) of a run of samples."""
        while start < stop:
            chunk, first = divmod(start, self.chunk)
            last = min(self.chunk, first + stop - start)
            yield chunk, first, last
            start += last - first

    def texts(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """The texts of some samples."""
        for chunk, first, last in self.spans(start, stop):
            if (entry := self._chunks[chunk].get(name)) is None:
                yield from [b""] * (last - first)
                continue
            ends, blob = entry
            places = np.append(0 if not first else [], self.numbers(ends, max(0, first - 1), last))
            edges = places.astype(np.int64).tolist()
            data = self._bytes(blob, edges[0], edges[-1])
            for a, b in pairwise(edges):
                yield data[a - edges[0] : b - edges[0]]

    def check(self) -> None:
        """Compares every blob with its checksum.

        Raises:
            DataError: class `integrity`.
        """
        for entry in (self.facts["bad"], *(each for one in self._chunks for each in one.values())):
            is_text = isinstance(entry, list) and isinstance(entry[1], list)
            for blob in entry if is_text else [entry]:
                if isinstance(blob, list):
                    self._bytes(blob, 0, 0)

    def may_have(self, name: str, chunk: int, text: bytes) -> bool:
        """Whether a text occurs anywhere in a chunk's texts."""
        entry = self._chunks[chunk].get(name)
        return entry is not None and text in self._bytes(entry[1], 0, entry[1][1])

    def _bytes(self, blob: Sequence[Any], first: int, stop: int) -> bytes:
        """Part of a blob. The first time all of it is read and compared with its checksum."""
        offset, size, crc = blob[:3]
        if offset not in self._checked:
            data = self._take(offset, size)
            if zlib.crc32(data) != crc:
                raise self._damaged(offset, size)
            self._checked.add(offset)
            return data[first:stop]
        return self._take(offset + first, stop - first)

    def _take(self, offset: int, size: int) -> bytes:
        now = time.monotonic()
        if self.path is not None and now - self._touched > TOUCH_SECONDS:
            self._touched = now
            with suppress(OSError):
                os.utime(self.path)
        try:
            data = self._read(offset, size)
        except OSError as error:
            refuse_full_table(error)
            raise transport_error(
                f"the table {self.path} cannot be read: {error.strerror or error}. It is a copy of "
                "the index, so it may be removed; start again"
            ) from error
        if len(data) != size:
            raise self._damaged(offset, size, " (it is shorter now)")
        return data

    def _damaged(self, offset: int, size: int, why: str = "") -> DataError:
        self.remove()
        return integrity_error(
            f"the table {self.path} is damaged: bytes {offset} to {offset + size} are not those "
            f"that were written{why}. It is a copy of the index and was removed. Start again; the "
            "launch makes it anew"
        )


def open_columns(path: Path) -> ColumnsFile | None:
    """The file; None where it is missing or its directory is damaged, so that it is made again."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for ever
    except FileNotFoundError:
        return None
    except OSError as error:
        refuse_full_table(error)
        logger.warning("the table %s cannot be used (%s); it is made again", path, error)
        return None
    status = os.fstat(descriptor)

    def read(offset: int, length: int) -> bytes:
        return os.pread(descriptor, length, offset)

    try:
        file = ColumnsFile(read, status.st_size, path.name, path, status.st_ino)
    except (OSError, ValueError, LookupError) as error:
        os.close(descriptor)
        logger.warning("the table %s is damaged (%s); it is made again", path, error)
        _remove(path, status.st_ino)
        return None
    weakref.finalize(file, os.close, descriptor)
    refusal = INDEX.refusal(file.facts.get(FORMAT), f"the table {path}")
    if refusal is not None:
        logger.warning("%s; it is made again now", refusal)
    return file if refusal is None else None


def _remove(path: Path, inode: int) -> None:
    with suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


@dataclass(frozen=True, slots=True)
class Column:
    """A column of int64 in a file, which is read as it is asked for.

    Args:
        changed: (places in ascending order, their values) that differ from the file's.
    """

    file: ColumnsFile
    name: str
    default: int
    changed: tuple[Int64s, Int64s] | None = None

    @property
    def shape(self) -> tuple[int]:
        """See Numbers."""
        return (self.file.num_rows,)

    def __getitem__(self, where: Any, /) -> Any:
        """See Numbers.

        Raises:
            DataError: class `integrity`, where the file is damaged or was cut.
        """
        if isinstance(where, slice):
            start, stop, _ = where.indices(self.file.num_rows)
            values = self._run(start, stop)
            return self._with_changes(np.arange(start, stop), values)
        if isinstance(where, np.ndarray):
            places = np.flatnonzero(where) if where.dtype == np.bool_ else where
            return self._with_changes(places, self._gathered(places))
        return int(self[where : where + 1][0])

    def with_changes(self, places: Int64s, values: Int64s) -> Column:
        """The column with other values at some places, which ascend."""
        return replace(self, changed=(places, values))

    def _run(self, start: int, stop: int) -> Int64s:
        rows = [
            self.file.rows(self.name, self.default, *span) for span in self.file.spans(start, stop)
        ]
        return np.concatenate([np.empty(0, np.int64), *rows]) if len(rows) != 1 else rows[0]

    def _gathered(self, numbers: Int64s) -> Int64s:
        assert not numbers.size or 0 <= numbers.min() <= numbers.max() < self.file.num_rows
        values = np.empty(numbers.shape, np.int64)
        chunks, rows = np.divmod(numbers, self.file.chunk)
        order = np.argsort(chunks, kind="stable")
        borders = np.flatnonzero(np.diff(chunks[order])) + 1
        for places in np.split(order, borders) if numbers.size else ():
            inside = rows[places]
            first, last = int(inside.min()), int(inside.max())
            chunk = int(chunks[places[0]])
            read = self.file.rows(self.name, self.default, chunk, first, last + 1)
            values[places] = read[inside - first]
        return values

    def _with_changes(self, numbers: Int64s, values: Int64s) -> Int64s:
        if self.changed is None:
            return values
        places, new = self.changed
        at = np.minimum(np.searchsorted(places, numbers), places.size - 1)
        return np.where(places[at] == numbers, new[at], values)


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of texts in a file, which is read as it is asked for."""

    file: ColumnsFile
    name: str

    def __getitem__(self, rows: slice) -> list[str]:
        start, stop, _ = rows.indices(self.file.num_rows)
        return [text.decode() for text in self.file.texts(self.name, start, stop)]

    def find(self, text: str) -> list[int]:
        """The samples that have a text."""
        found, wanted = [], text.encode()
        for chunk, first, last in self.file.spans(0, self.file.num_rows):
            if self.file.may_have(self.name, chunk, wanted):
                start = chunk * self.file.chunk
                texts = enumerate(self.file.texts(self.name, start + first, start + last), start)
                found += [number for number, each in texts if each == wanted]
        return found
