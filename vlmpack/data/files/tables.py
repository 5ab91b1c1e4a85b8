"""Parquet and Arrow: a row is a record, found again by its row group or batch.

Such a unit is decoded whole, with the columns that the layout names, and kept. The samples of a
shuffle window then decode each unit once or few times. A unit above `MAX_GROUP_BYTES` is refused,
since every sample of it would cost that much.

pyarrow trusts the offsets and lengths of a stream, so a damaged one would read beyond the batch's
memory and end the process. Each batch is therefore checked first. A text that is no UTF-8 is a
fault of its row alone.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpack import errors
from vlmpack.data.files.parquet_footer import Chunk, read_chunks
from vlmpack.data.files.record import Place, Record, RecordFile, as_record
from vlmpack.data.shards.naming import SampleCaps, refuse_many_keys
from vlmpack.errors import DataError, integrity_error, or_error, schema_error
from vlmpack.limits import MAX_GROUP_BYTES
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import sized

KEPT_BYTES = 256 << 20
"""What one process keeps of decoded units, of all its files together."""
BATCH_ROWS = 32
"""Rows that are made values of at a time."""
UNREADABLE = (pa.ArrowException, *errors.UNREADABLE)
"""What pyarrow raises over a damaged file, or a name of a column that is no UTF-8."""
FILE_MAGIC = b"ARROW1"
"""How the other Arrow format begins, that of files with a footer."""
END_MARKS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""How a stream of Arrow ends, and how it did before Arrow 0.15."""
_END_BYTES = 1 << 10
_NO_VALUE = (ValueError, OverflowError)
"""What pyarrow raises of a text that is no UTF-8, or a time that Python does not have."""
ChooseColumns = Callable[[Sequence[str]], Sequence[str]]
"""Names of a table's columns -> those that are read."""


def take_all(names: Sequence[str]) -> Sequence[str]:
    """All of a table's columns."""
    return names


@dataclass(slots=True)
class KeptRows:
    """Decoded units up to a number of bytes. The least recently used goes first; the newest always
    stays."""

    most: int = KEPT_BYTES
    _tables: OrderedDict[tuple[str, int], Any] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def get(self, path: str, offset: int, make: Callable[[], Any]) -> Any:
        """The unit at an offset of a file; `make` decodes it where it is not kept."""
        key = (path, offset)
        table = self._tables.get(key)
        if table is not None:
            self._tables.move_to_end(key)
            return table
        table = make()
        self._bytes += table.nbytes
        while self._tables and self._bytes > self.most:
            self._bytes -= self._tables.popitem(last=False)[1].nbytes
        self._tables[key] = table
        return table

    def drop(self, path: str) -> None:
        """Let go of what is of one file."""
        for key in [key for key in self._tables if key[0] == path]:
            self._bytes -= self._tables.pop(key).nbytes


class Unit(NamedTuple):
    """A row group or batch: what messages call it, its byte range, and batches of its rows."""

    name: str
    offset: int
    length: int
    batches: Iterable[Any]


@dataclass(slots=True)
class TableFile(RecordFile):
    """A file whose records are the rows of a table."""

    fetcher: Fetcher
    stamp: ShardStamp
    caps: SampleCaps
    choose: ChooseColumns
    is_bounded: bool = True
    kept: KeptRows = field(default_factory=KeptRows)
    _columns: tuple[str, ...] = ()
    _unused: tuple[str, ...] = ()

    noun = "row"
    units: ClassVar[str]
    """What messages call the units of such a file."""

    def scan(self) -> Generator[Record]:
        """See RecordFile."""
        number = 0
        for unit in self._units():
            row = 0
            try:
                for batch in unit.batches:
                    for value in _row_values(batch):
                        place = Place(number, unit.offset, unit.length, row)
                        yield _row_record(place, value, self._unused)
                        number, row = number + 1, row + 1
            except UNREADABLE as error:
                raise self._damaged(unit.name, error, unit.offset) from error

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        return [or_error(self._read_row, place) for place in places]

    def close(self) -> None:
        """See RecordFile."""
        self.kept.drop(self.stamp.path)

    def _read_row(self, place: Place) -> Record:
        self._open()
        table = self.kept.get(self.stamp.path, place.offset, partial(self._decode, place))
        if place.row >= table.num_rows:
            raise self._changed()
        [value] = _row_values(table.slice(place.row, 1))
        return _row_record(place, value, self._unused)

    def _choose(self, names: Sequence[str]) -> None:
        refuse_many_keys(names, self.stamp.path)
        self._columns = tuple(self.choose(names))
        read = {*self._columns}
        self._unused = tuple(name for name in names if name not in read)

    def _changed(self) -> DataError:
        return self._error(f"its {self.units} are not those that were indexed; the file changed")

    def _error(self, reason: str, offset: int | None = None) -> DataError:
        return integrity_error(reason, shard=self.stamp.path, offset=offset)

    @abstractmethod
    def _units(self) -> Iterator[Unit]:
        """All units, in order. Raises DataError where the file is damaged."""

    @abstractmethod
    def _open(self) -> None:
        """Read what is needed before a unit can be decoded, once."""

    @abstractmethod
    def _decode(self, place: Place) -> Any:
        """The unit that a record is in."""

    @abstractmethod
    def _damaged(self, name: str, error: Exception, offset: int | None) -> DataError:
        """What a unit that cannot be read is refused with."""


@dataclass(slots=True)
class ParquetRows(TableFile):
    """The rows of a parquet file."""

    units = "row groups"

    _file: pq.ParquetFile | None = None
    _source: FetchedFile | None = None
    _chunks: list[list[Chunk]] = field(default_factory=list)
    _groups: dict[int, int] = field(default_factory=dict)
    """Offset of a row group in the file -> its number."""

    def close(self) -> None:
        """See RecordFile."""
        if self._file is not None:
            self._file.close(force=True)
        self._file = self._source = None
        self.kept.drop(self.stamp.path)

    def _units(self) -> Iterator[Unit]:
        self._open()
        for group in range(len(self._chunks)):
            yield Unit(f"row group {group}", *self._span(group), self._batches(group))

    def _batches(self, group: int) -> Iterator[Any]:
        assert self._file is not None
        yield from self._file.iter_batches(
            batch_size=BATCH_ROWS,
            row_groups=[group],
            columns=list(self._columns),
            use_threads=False,
        )

    def _open(self) -> None:
        """Read the footer, and choose the columns that are read, once."""
        if self._file is not None:
            return
        self._source = FetchedFile(self.fetcher, self.stamp)
        try:
            file = pq.ParquetFile(pa.PythonFile(self._source, mode="r"))
            names = file.schema_arrow.names
            chunks = read_chunks(self._source, self.stamp.size)
        except UNREADABLE as error:
            raise self._damaged("the footer", error, None) from error
        self._choose(names)
        self._chunks = [[c for c in group if c.column in self._columns] for group in chunks]
        self._check_groups()
        self._file = file
        self._groups = {self._span(n)[0]: n for n in range(len(chunks))}

    def _check_groups(self) -> None:
        for group, chunks in enumerate(self._chunks if self.is_bounded else ()):
            size = sum(chunk.uncompressed for chunk in chunks)
            if size > MAX_GROUP_BYTES:
                raise self._error(
                    f"row group {group} has {sized(size)} in the columns that are read, and each "
                    f"of its samples reads all of it. At most {sized(MAX_GROUP_BYTES)} are read. "
                    "Write smaller row groups (pyarrow: row_group_size=100), or make shards by "
                    "`vlmpack data convert`"
                )

    def _span(self, group: int) -> tuple[int, int]:
        """(offset, bytes) of what is read of a row group."""
        chunks = self._chunks[group]
        first = min((chunk.start for chunk in chunks), default=0)
        return first, max((chunk.start + chunk.compressed for chunk in chunks), default=0) - first

    def _decode(self, place: Place) -> Any:
        group = self._groups.get(place.offset)
        if group is None:
            raise self._changed()
        assert self._file is not None
        try:
            return self._file.read_row_group(group, list(self._columns), use_threads=False)
        except UNREADABLE as error:
            raise self._damaged(f"row group {group}", error, self._span(group)[0]) from error

    def _damaged(self, name: str, error: Exception, offset: int | None) -> DataError:
        assert self._source is not None
        fault, self._source.fault = self._source.fault, None
        return fault or self._error(
            f"{name} cannot be read as parquet: {error}; how many records are lost is unknown",
            offset,
        )


@dataclass(slots=True)
class ArrowRows(TableFile):
    """The rows of a stream of record batches, as `datasets.save_to_disk` writes them."""

    units = "batches"

    _schema: Any = None
    _source: FetchedFile | None = None

    def close(self) -> None:
        """See RecordFile."""
        self._schema = None
        self.kept.drop(self.stamp.path)

    def _units(self) -> Iterator[Unit]:
        file, reader = self._open_stream()
        assert self._source is not None
        try:
            end = file.tell()
            while True:
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    break
                start, end = end, file.tell()
                if self.is_bounded and end - start > MAX_GROUP_BYTES:
                    raise self._error(
                        f"a batch of {sized(end - start)}, and each of its samples reads all of "
                        f"it. At most {sized(MAX_GROUP_BYTES)} are read. Save the data set in "
                        "smaller batches, or make shards of it by `vlmpack data convert`",
                        start,
                    )
                yield Unit("the batch", start, end - start, [self._checked(batch)])
            self._source.seek(end)
            self._check_end(self._source.read(_END_BYTES), end)
        except UNREADABLE as error:
            raise self._damaged("the stream", error, None) from error

    def _open(self) -> None:
        if self._schema is None:
            self._open_stream()

    def _open_stream(self) -> tuple[Any, Any]:
        """The file, and a reader of its batches, whose schema was taken."""
        self._source = FetchedFile(self.fetcher, self.stamp)
        try:
            if self._source.read(len(FILE_MAGIC)) == FILE_MAGIC:
                raise schema_error(
                    "the file is an Arrow file with a footer. Expected a stream, as "
                    "datasets.save_to_disk writes it: load and save it there, or write parquet",
                    shard=self.stamp.path,
                )
            self._source.seek(0)
            file = pa.PythonFile(self._source, mode="r")
            reader = pa.ipc.open_stream(file)
            names = reader.schema.names
        except UNREADABLE as error:
            raise self._damaged("the stream", error, None) from error
        self._choose(names)
        self._schema = reader.schema
        return file, reader

    def _check_end(self, rest: bytes, end: int) -> None:
        """Raise DataError unless a stream ends as its writer ended it, and not between two
        batches."""
        if rest in END_MARKS:
            return
        reason = (
            f"the stream ends in {rest[:16]!r}, which is no batch and not the mark of its end"
            if rest
            else "the file ends without the mark of a stream's end. It is cut short, and how many "
            "records are missing is unknown"
        )
        raise self._error(reason, end)

    def _decode(self, place: Place) -> Any:
        data = self.fetcher.read(self.stamp, place.offset, place.length)
        try:
            message = pa.ipc.read_message(pa.BufferReader(data))
            return self._checked(pa.ipc.read_record_batch(message, self._schema))
        except UNREADABLE as error:
            raise self._error(f"the batch cannot be read: {error}", place.offset) from error

    def _checked(self, batch: Any) -> Any:
        """The columns of a batch that are read. Raises pa.ArrowInvalid for references outside the
        batch."""
        batch = batch.select(self._columns)
        for column in batch.columns:
            bare = _without_texts(column.type)
            (column if bare == column.type else column.view(bare)).validate(full=True)
        return batch

    def _damaged(self, name: str, error: Exception, offset: int | None) -> DataError:
        assert self._source is not None
        return self._source.fault or self._error(
            f"cannot be read as a stream of Arrow batches: {error}; how many records are lost "
            "is unknown"
        )


def _row_values(batch: Any) -> Iterator[Any]:
    """The values of the rows of a batch or table, with the error in place of an unreadable one."""
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield from _values(batch.slice(start, BATCH_ROWS))


def _values(part: Any) -> list[Any]:
    try:
        return list(part.to_pylist())
    except _NO_VALUE as error:
        if part.num_rows == 1:
            return [error]
    return [value for row in range(part.num_rows) for value in _values(part.slice(row, 1))]


def _row_record(place: Place, value: Any, unused: tuple[str, ...]) -> Record:
    """A record of a row's value, with a fault where it is an error."""
    if isinstance(value, _NO_VALUE):
        return Record(place, None, schema_error(f"cannot be read: {value}"), unused)
    return as_record(place, value, unused)


def _without_texts(kind: Any) -> Any:
    """A type with bytes where it has texts, which lie in memory alike."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = kind.value_field.with_type(_without_texts(kind.value_type))
        return pa.list_(item) if pa.types.is_list(kind) else pa.large_list(item)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_texts(field.type)) for field in kind])
    return kind


class FetchedFile(io.RawIOBase):
    """A file read by ranges as a seekable object. Keeps a store's error in `fault`, since pyarrow
    rewords it."""

    def __init__(self, fetcher: Fetcher, stamp: ShardStamp) -> None:
        self.fetcher = fetcher
        self.stamp = stamp
        self.fault: DataError | None = None
        self._at = 0

    def readable(self) -> bool:
        """See io.RawIOBase: always."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase: always."""
        return True

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io.RawIOBase."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.stamp.size}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """See io.RawIOBase."""
        remaining = max(0, self.stamp.size - self._at)
        count = remaining if size is None or size < 0 else min(size, remaining)
        if not count:
            return b""
        try:
            data = self.fetcher.read(self.stamp, self._at, count)
        except DataError as error:
            self.fault = error
            raise OSError(error.reason) from error
        self._at += count
        return data
