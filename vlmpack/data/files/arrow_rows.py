"""Arrow: a record a row of a stream of record batches, as `datasets.save_to_disk` writes them.

Each batch is found again by its byte range, so that one batch is decoded where one sample is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from vlmpack.data.files.fetched_file import FetchedFile
from vlmpack.data.files.kept_rows import KeptRows
from vlmpack.data.files.parquet_rows import ChooseColumns
from vlmpack.data.files.record import Place, Record
from vlmpack.data.files.table_rows import UNREADABLE, check_batch, row_record, row_values
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.keys import refuse_many_keys
from vlmpack.errors import DataError, schema_error
from vlmpack.limits import MAX_GROUP_BYTES
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import sized

FILE_MAGIC = b"ARROW1"
"""How the other Arrow format begins, that of files with a footer."""
END_MARKS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""How a stream ends, and how it did before Arrow 0.15."""
_LOOKED_AT = 1 << 10


@dataclass(slots=True)
class ArrowRows:
    """The rows of one stream.

    Args:
        choose: which columns are read.
        is_bounded: whether a large batch is refused: each is decoded once by who only scans.
        kept: where batches are kept that were decoded.
    """

    fetcher: Fetcher
    stamp: ShardStamp
    caps: SampleCaps
    choose: ChooseColumns
    is_bounded: bool = True
    kept: KeptRows = field(default_factory=KeptRows)
    noun: str = "row"
    _schema: Any = None
    _columns: tuple[str, ...] = ()
    _unread: tuple[str, ...] = ()

    def scan(self) -> Iterator[Record]:
        """See RecordFile."""
        number = 0
        for offset, length, batch in self._read_batches():
            for row, value in enumerate(row_values(batch)):
                yield row_record(Place(number, offset, length, row), value, self._unread)
                number += 1

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        found: list[Record | DataError] = []
        for place in places:
            try:
                if self._schema is None:
                    self._opened()
                table = self.kept.get(self.stamp.path, place.offset, partial(self._decoded, place))
                if place.row >= table.num_rows:
                    raise self._changed()
                [value] = row_values(table.slice(place.row, 1))
                found.append(row_record(place, value, self._unread))
            except DataError as error:
                found.append(error)
        return found

    def close(self) -> None:
        """See RecordFile."""
        self._schema = None
        self.kept.drop(self.stamp.path)

    def _read_batches(self) -> Iterator[tuple[int, int, Any]]:
        """(offset, bytes, checked columns that are read) of each record batch."""
        source, file, reader = self._opened()
        try:
            end = file.tell()
            while True:
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    break
                begin, end = end, file.tell()
                if self.is_bounded and end - begin > MAX_GROUP_BYTES:
                    raise self._too_large(begin, end - begin)
                batch = batch.select(self._columns)
                check_batch(batch)
                yield begin, end - begin, batch
            source.seek(end)
            self._check_end(source.read(_LOOKED_AT), end)
        except UNREADABLE as error:
            raise self._damaged(source, error) from error

    def _opened(self) -> tuple[FetchedFile, Any, Any]:
        """The file, and a reader of its batches, whose schema was taken."""
        source = FetchedFile(self.fetcher, self.stamp)
        try:
            if source.read(len(FILE_MAGIC)) == FILE_MAGIC:
                raise schema_error(
                    "the file is an Arrow file with a footer; expected a stream, as "
                    "datasets.save_to_disk writes it: load and save it there, or write parquet",
                    shard=self.stamp.path,
                )
            source.seek(0)
            file = pa.PythonFile(source, mode="r")
            reader = pa.ipc.open_stream(file)
            names = reader.schema.names
        except UNREADABLE as error:
            raise self._damaged(source, error) from error
        refuse_many_keys(names, self.stamp.path)
        self._columns = tuple(self.choose(names))
        read = {*self._columns}
        self._unread = tuple(name for name in names if name not in read)
        self._schema = reader.schema
        return source, file, reader

    def _check_end(self, rest: bytes, end: int) -> None:
        """Raise DataError unless a stream ends as whoever wrote all of it left it: a stream that
        was cut between two batches would be a shorter one."""
        if rest in END_MARKS:
            return
        reason = (
            f"the stream ends in {rest[:16]!r}, which is no batch and not the mark of its end"
            if rest
            else "the file ends without the mark of a stream's end; it is cut short, and how many "
            "records are missing is unknown"
        )
        raise DataError(reason, error_class="integrity", shard=self.stamp.path, offset=end)

    def _decoded(self, place: Place) -> Any:
        data = self.fetcher.read(self.stamp, place.offset, place.length)
        try:
            message = pa.ipc.read_message(pa.BufferReader(data))
            batch = pa.ipc.read_record_batch(message, self._schema).select(self._columns)
            check_batch(batch)
        except UNREADABLE as error:
            raise DataError(
                f"the batch cannot be read: {error}",
                error_class="integrity",
                shard=self.stamp.path,
                offset=place.offset,
            ) from error
        return batch

    def _damaged(self, source: FetchedFile, error: Exception) -> DataError:
        return source.fault or DataError(
            f"cannot be read as a stream of Arrow batches: {error}; how many records are lost "
            "is unknown",
            error_class="integrity",
            shard=self.stamp.path,
        )

    def _changed(self) -> DataError:
        return DataError(
            "its batches are not those that were indexed; the file changed",
            error_class="integrity",
            shard=self.stamp.path,
        )

    def _too_large(self, offset: int, size: int) -> DataError:
        return DataError(
            f"a batch of {sized(size)}, all of which each of its samples costs; at most "
            f"{sized(MAX_GROUP_BYTES)} are read: save the data set in smaller batches, or make "
            "shards of it by `vlmpack data convert`",
            error_class="integrity",
            shard=self.stamp.path,
            offset=offset,
        )
