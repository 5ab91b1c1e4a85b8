"""Index and lengths of a split in one sealed file, of which a reader reads what it asks for.

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

import hashlib
import io
import json
import logging
import os
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlmpack.data.index.groups import SamplePrefixes, joined_digests
from vlmpack.data.index.held_out import NEVER, OPENING
from vlmpack.data.index.lengths import CHOSEN, COUNTS, ShardBuilder, load_lengths, objects_said
from vlmpack.data.index.parts import BuildSettings, Part, build_parts, part_for, unwritable
from vlmpack.data.index.shard_index import ShardIndex, load_index
from vlmpack.data.shards.naming import count_keys
from vlmpack.errors import DataError, integrity_error, refuse_full_table, transport_error
from vlmpack.file_format import FORMAT, INDEX
from vlmpack.storage.fetch import ShardStamp
from vlmpack.whole_file import written_whole

Int64s = npt.NDArray[np.int64]

CHUNK = 1 << 18
"""Samples of a chunk: 1 MiB of a column of four bytes."""

_SEAL_BYTES = 24

logger = logging.getLogger("vlmpack")


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
        self._stream.write(data + len(data).to_bytes(8, "little") + _seal(self._name, data))


def _seal(name: str, directory: bytes) -> bytes:
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16)
    digest.update(directory)
    return digest.digest()


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
        end = read(size - _SEAL_BYTES, _SEAL_BYTES) if size >= _SEAL_BYTES else b""
        length = int.from_bytes(end[:8], "little")
        start = size - _SEAL_BYTES - length
        directory = read(start, length) if end and start >= 0 else b""
        if not end or end[8:] != _seal(name, directory):
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


LARGE = 4_000_000
"""Samples from which on no process keeps numbers of a split in memory."""
MOST_IN_MEMORY = 10_000_000
"""Samples of a table for which there is no room on the disk."""
MOST_KEPT = 8
KEPT_SECONDS = 24 * 3600
"""A folder keeps the last MOST_KEPT tables that were used, and those that were within a day."""
TOUCH_SECONDS = 3600
"""A process that reads a table says so at this interval, by the time of the file."""
SUFFIX = ".table"
DIGESTS, STAMPS, PREFIXES = "image_digests", "image_stamps", ("prefix_length", "prefix_digest")
DEFAULTS = {"branch": -1, "row": 0, OPENING: NEVER}
"""The values of columns that a part may lack, or have nulls in."""

_NUMBERS = ("offset", "length", "crc32", *COUNTS, CHOSEN, *DEFAULTS)
_OF_INDEX = {"key", "offset", "length", "crc32", *DEFAULTS, DIGESTS, STAMPS}

Pair = tuple[ShardIndex, Any]
"""A shard's index, and the pyarrow table of its lengths."""


class TableWriter:
    """Writes the samples of shards, CHUNK at a time."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.num_samples = 0
        self._columns = ColumnsWriter(stream, name)
        self._waiting: list[tuple[Any, Any]] = []
        self._written = self._num_waiting = 0
        self._counts: list[int] = []
        self._contents: list[str] = []
        self._unknown: list[Mapping[str, int]] = []
        self._objects = ""
        self._lengths = hashlib.blake2b(digest_size=16)
        self._faults: defaultdict[tuple[str, str], list[int]] = defaultdict(list)

    def add(self, shard: ShardIndex, lengths: Any) -> None:
        """The next shard."""
        names = [name for name in shard.table.column_names if name in _OF_INDEX]
        self._waiting.append((shard.table.select(names).replace_schema_metadata(None), lengths))
        self._counts.append(shard.num_samples)
        self._contents.append(shard.content)
        self._unknown.append(shard.unknown_keys)
        self._objects = self._objects or objects_said([lengths])
        self.num_samples += shard.num_samples
        self._num_waiting += shard.num_samples
        if self._num_waiting >= CHUNK:
            self._write(CHUNK)

    def finish(self) -> None:
        """Writes the rest, and what is known of the whole."""
        if self._waiting:
            self._write(1)
        bad = np.asarray([n for numbers in self._faults.values() for n in numbers], np.int64)
        facts = {
            "shard_counts": self._counts,
            "contents": self._contents,
            "unknown_keys": count_keys(self._unknown),
            "objects": self._objects,
            "lengths": self._lengths.hexdigest(),
            "faults": [[*fault, len(numbers)] for fault, numbers in self._faults.items()],
            "bad": self._columns.numbers(bad),
        }
        self._columns.finish(facts)

    def _write(self, least: int) -> None:
        """Write chunks until fewer than `least` samples wait."""
        rows = pa.concat_tables([row for row, _ in self._waiting], promote_options="default")
        lengths = pa.concat_tables([each for _, each in self._waiting]).replace_schema_metadata()
        while rows.num_rows >= least:
            self._write_chunk(rows.slice(0, CHUNK), lengths.slice(0, CHUNK))
            rows, lengths = rows.slice(CHUNK), lengths.slice(CHUNK)
        self._waiting, self._num_waiting = [(rows, lengths)], rows.num_rows

    def _write_chunk(self, rows: Any, lengths: Any) -> None:
        table = rows
        for name in lengths.column_names:
            table = table.append_column(name, lengths.column(name))
        table = table.combine_chunks()
        self._lengths.update(table.column("num_tokens").to_numpy().tobytes())
        there = [name for name in _NUMBERS if name in table.column_names]
        numbers = {
            name: np.asarray(table.column(name).fill_null(DEFAULTS.get(name, 0)).to_numpy())
            for name in there
        }
        numbers[DIGESTS] = joined_digests(table.column(DIGESTS).combine_chunks())
        if "prefixes" in table.column_names:
            prefixes = SamplePrefixes.of(table.column("prefixes"))
            for name, columns in zip(PREFIXES, (prefixes.lengths, prefixes.digests), strict=True):
                numbers |= {f"{name}.{k}": columns[:, k] for k in range(columns.shape[1])}
        texts = {"key": table.column("key").combine_chunks()}
        if STAMPS in table.column_names and table.column(STAMPS).null_count < table.num_rows:
            listed = table.column(STAMPS).to_pylist()
            texts[STAMPS] = pa.array([json.dumps(each) if each else "" for each in listed])
        self._columns.add(numbers, texts)
        bad = table.select(("error_class", "reason"))
        for number in np.flatnonzero(table.column("reason").is_valid().to_numpy()).tolist():
            fault = bad.slice(number, 1).to_pylist()[0]
            self._faults[fault["error_class"], fault["reason"]].append(self._written + number)
        self._written += table.num_rows


def open_table(
    stamps: Sequence[ShardStamp], builder: ShardBuilder, settings: BuildSettings
) -> ColumnsFile:
    """The table of some shards. What is missing of it is indexed, measured and written.

    One process writes the file, and those that want it wait. Where it cannot be written, each
    process keeps the table in memory.

    Raises:
        DataError: the first shard in order that is damaged or out of reach; class `transport` where
            a table of more than MOST_IN_MEMORY samples cannot be written.
    """
    index, lengths, path = table_parts(stamps, builder, settings)
    file = _open_current(path, builder)
    if file is not None:
        return file
    build_parts(index, builder, settings, what="index")
    build_parts(lengths, builder.lengths, settings, what="lengths")
    pairs = partial(_pairs, index, lengths, builder)
    try:
        build_parts([Part(stamps[0], str(path))], partial(_write, pairs), settings, what="table")
        if (file := _open_current(path, builder)) is not None:
            return file
        raise unwritable(str(path), OSError("it does not read back"))
    except DataError as error:
        if error.error_class != "transport":
            raise
        logger.warning("%-14s %s; each process keeps it in memory", "index", error.reason)
    return in_memory(pairs())


def table_parts(
    stamps: Sequence[ShardStamp], builder: ShardBuilder, settings: BuildSettings
) -> tuple[list[Part], list[Part], Path]:
    """The index parts and the lengths parts of some shards, and the path of the table of both."""
    rules = (builder.rule, builder.lengths.rule)
    index, lengths = ([part_for(settings.directory, s, rule) for s in stamps] for rule in rules)
    names = "\n".join(part.path.rpartition("/")[2] for part in (*index, *lengths))
    digest = hashlib.blake2b(names.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return index, lengths, settings.directory / f"{digest}{SUFFIX}"


def _open_current(path: Path, builder: ShardBuilder) -> ColumnsFile | None:
    """The file, where it is whole and its objects are written as they are now. A file of fewer than
    LARGE samples is kept in memory."""
    file = open_columns(path)
    if file is None:
        return None
    try:
        if file.num_rows < LARGE:
            file.keep_in_memory()
    except DataError as error:
        logger.warning("%s", error.reason)
        return None
    objects = file.facts["objects"]
    if objects and objects != builder.lengths.encoder.objects_said:
        file.remove()
        return None
    with suppress(OSError):
        os.utime(path)  # used: others are older
    return file


def _pairs(index: Sequence[Part], lengths: Sequence[Part], builder: ShardBuilder) -> Iterator[Pair]:
    for part, of_lengths in zip(index, lengths, strict=True):
        shard = load_index(part, builder)
        yield shard, load_lengths(of_lengths, shard, builder.lengths)


def _write(pairs: Callable[[], Iterable[Pair]], part: Part) -> None:
    path = Path(part.path)
    try:
        with written_whole(path) as stream:
            writer = TableWriter(stream, path.name)
            for pair in pairs():
                writer.add(*pair)
            writer.finish()
    except OSError as error:
        raise unwritable(part.path, error) from error
    with suppress(OSError):  # another process may remove the same ones
        found = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
        unfinished = path.parent.glob(f".*{SUFFIX}.*.tmp")
        for file in (*found[:-MOST_KEPT], *unfinished):
            if time.time() - file.stat().st_mtime > KEPT_SECONDS:
                file.unlink(missing_ok=True)


def in_memory(pairs: Iterable[Pair]) -> ColumnsFile:
    """The table of some shards in the memory of this process.

    Raises:
        DataError: class `transport`, for more than MOST_IN_MEMORY samples.
    """
    stream = io.BytesIO()
    writer = TableWriter(stream, SUFFIX)
    for pair in pairs:
        writer.add(*pair)
        if writer.num_samples > MOST_IN_MEMORY:
            raise transport_error(
                f"the table of the index has over {MOST_IN_MEMORY:,} samples, which is too many "
                "for the memory of each process. Set data.index_dir to a folder with room for it"
            )
    writer.finish()
    view = stream.getbuffer()
    return ColumnsFile(lambda offset, length: bytes(view[offset:][:length]), len(view), SUFFIX)
