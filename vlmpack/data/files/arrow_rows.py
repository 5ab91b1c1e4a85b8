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
from vlmpack.data.files.parquet_rows import BATCH_ROWS, MAX_GROUP_BYTES, ChooseColumns
from vlmpack.data.files.record import Place, Record, as_record, without_nulls
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.errors import DataError, schema_error
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import sized

FILE_MAGIC = b"ARROW1"
"""How the other Arrow format begins, that of files with a footer."""


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
            row = 0
            rows = batch.select(self._columns)
            for first in range(0, rows.num_rows, BATCH_ROWS):
                for value in rows.slice(first, BATCH_ROWS).to_pylist():
                    yield self._record(Place(number, offset, length, row), value)
                    number, row = number + 1, row + 1

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        found: list[Record | DataError] = []
        for place in places:
            try:
                if self._schema is None:
                    next(self._read_batches(), None)  # the schema stands before the first
                table = self.kept.get(self.stamp.path, place.offset, partial(self._decoded, place))
                if place.row >= table.num_rows:
                    raise self._changed()
                found.append(self._record(place, table.slice(place.row, 1).to_pylist()[0]))
            except DataError as error:
                found.append(error)
        return found

    def close(self) -> None:
        """See RecordFile."""
        self._schema = None
        self.kept.drop(self.stamp.path)

    def _record(self, place: Place, value: Any) -> Record:
        return as_record(place, without_nulls(value), self._unread)

    def _read_batches(self) -> Iterator[tuple[int, int, Any]]:
        """(offset, bytes, batch) of each record batch."""
        source = FetchedFile(self.fetcher, self.stamp)
        if source.read(len(FILE_MAGIC)) == FILE_MAGIC:
            raise schema_error(
                "the file is an Arrow file with a footer; expected a stream, as "
                "datasets.save_to_disk writes it: load and save it there, or write parquet",
                shard=self.stamp.path,
            )
        source.seek(0)
        try:
            file = pa.PythonFile(source, mode="r")
            reader = pa.ipc.open_stream(file)
            self._take_schema(reader.schema)
            end = file.tell()
            while True:
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    break
                begin, end = end, file.tell()
                if self.is_bounded and end - begin > MAX_GROUP_BYTES:
                    raise self._too_large(begin, end - begin)
                yield begin, end - begin, batch
            if self.stamp.size - end > 16:
                raise DataError(
                    f"{self.stamp.size - end} bytes behind the end of the stream",
                    error_class="integrity",
                    shard=self.stamp.path,
                    offset=end,
                )
        except (OSError, pa.ArrowException) as error:
            raise source.fault or DataError(
                f"cannot be read as a stream of Arrow batches: {error}; how many records are lost "
                "is unknown",
                error_class="integrity",
                shard=self.stamp.path,
            ) from error

    def _take_schema(self, schema: Any) -> None:
        self._columns = tuple(self.choose(schema.names))
        self._unread = tuple(name for name in schema.names if name not in self._columns)
        self._schema = schema

    def _decoded(self, place: Place) -> Any:
        data = self.fetcher.read(self.stamp, place.offset, place.length)
        try:
            message = pa.ipc.read_message(pa.BufferReader(data))
            batch = pa.ipc.read_record_batch(message, self._schema)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"the batch cannot be read: {error}",
                error_class="integrity",
                shard=self.stamp.path,
                offset=place.offset,
            ) from error
        return batch.select(self._columns)

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
