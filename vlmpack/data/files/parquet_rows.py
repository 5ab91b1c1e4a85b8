"""Parquet: a record a row, found again in its row group, which is decoded as a whole.

Of the columns those are read that the layout names. A row group that was decoded is kept, so that
the samples of a shuffle window cost each row group once or few times; one that is larger than
`MAX_GROUP_BYTES` is refused, since every sample of it would cost that much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpack.data.files.fetched_file import FetchedFile
from vlmpack.data.files.kept_rows import KeptRows
from vlmpack.data.files.parquet_footer import Chunk, read_chunks
from vlmpack.data.files.record import Place, Record
from vlmpack.data.files.table_rows import BATCH_ROWS, UNREADABLE, row_record, row_values
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.keys import refuse_many_keys
from vlmpack.errors import DataError
from vlmpack.limits import MAX_GROUP_BYTES
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import sized

ChooseColumns = Callable[[Sequence[str]], Sequence[str]]
"""Names of a table's columns -> those that are read."""


@dataclass(slots=True)
class ParquetRows:
    """The rows of one file.

    Args:
        choose: which columns are read.
        is_bounded: whether a large row group is refused: nobody decodes it whole who only scans.
        kept: where row groups are kept that were decoded.
    """

    fetcher: Fetcher
    stamp: ShardStamp
    caps: SampleCaps
    choose: ChooseColumns
    is_bounded: bool = True
    kept: KeptRows = field(default_factory=KeptRows)
    noun: str = "row"
    _file: pq.ParquetFile | None = None
    _source: FetchedFile | None = None
    _columns: tuple[str, ...] = ()
    _unread: tuple[str, ...] = ()
    _chunks: list[list[Chunk]] = field(default_factory=list)
    _groups: dict[int, int] = field(default_factory=dict)

    def scan(self) -> Iterator[Record]:
        """See RecordFile."""
        file = self._opened()
        number = 0
        for group in range(len(self._chunks)):
            offset, length = self._span(group)
            row = 0
            try:
                batches = file.iter_batches(
                    batch_size=BATCH_ROWS,
                    row_groups=[group],
                    columns=list(self._columns),
                    use_threads=False,
                )
                for batch in batches:
                    for value in row_values(batch):
                        yield row_record(Place(number, offset, length, row), value, self._unread)
                        number, row = number + 1, row + 1
            except UNREADABLE as error:
                raise self._damaged(f"row group {group}", error, offset) from error

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        found: list[Record | DataError] = []
        for place in places:
            try:
                self._opened()
                group = self._groups.get(place.offset)
                if group is not None:
                    make = partial(self._decoded, group)
                    table = self.kept.get(self.stamp.path, group, make)
                if group is None or place.row >= table.num_rows:
                    raise self._error(
                        "its row groups are not those that were indexed; the file changed"
                    )
                [value] = row_values(table.slice(place.row, 1))
                found.append(row_record(place, value, self._unread))
            except DataError as error:
                found.append(error)
        return found

    def close(self) -> None:
        """See RecordFile."""
        if self._file is not None:
            self._file.close(force=True)
        self._file = self._source = None
        self.kept.drop(self.stamp.path)

    def _opened(self) -> pq.ParquetFile:
        if self._file is not None:
            return self._file
        self._source = FetchedFile(self.fetcher, self.stamp)
        try:
            file = pq.ParquetFile(pa.PythonFile(self._source, mode="r"))
            names = file.schema_arrow.names
            chunks = read_chunks(self._source, self.stamp.size)
        except UNREADABLE as error:
            raise self._damaged("the footer", error, None) from error
        refuse_many_keys(names, self.stamp.path)
        self._columns = tuple(self.choose(names))
        read = {*self._columns}
        self._unread = tuple(name for name in names if name not in read)
        self._chunks = [[c for c in group if c.column in read] for group in chunks]
        self._check_groups()
        self._file = file
        self._groups = {self._span(n)[0]: n for n in range(len(chunks))}
        return file

    def _check_groups(self) -> None:
        for group, chunks in enumerate(self._chunks if self.is_bounded else ()):
            size = sum(chunk.uncompressed for chunk in chunks)
            if size > MAX_GROUP_BYTES:
                raise self._error(
                    f"row group {group} has {sized(size)} in the columns that are read, and each "
                    f"of its samples costs all of it; at most {sized(MAX_GROUP_BYTES)} are read: "
                    "write the file with smaller row groups (pyarrow: row_group_size=100), or "
                    "make shards of it by `vlmpack data convert`"
                )

    def _span(self, group: int) -> tuple[int, int]:
        """(offset, bytes) of what is read of a row group."""
        chunks = self._chunks[group]
        first = min((chunk.begin for chunk in chunks), default=0)
        return first, max((chunk.begin + chunk.compressed for chunk in chunks), default=0) - first

    def _decoded(self, group: int) -> Any:
        assert self._file is not None
        try:
            return self._file.read_row_group(group, list(self._columns), use_threads=False)
        except UNREADABLE as error:
            raise self._damaged(f"row group {group}", error, self._span(group)[0]) from error

    def _damaged(self, what: str, error: Exception, offset: int | None) -> DataError:
        assert self._source is not None
        fault, self._source.fault = self._source.fault, None
        if fault is not None:
            return fault
        return DataError(
            f"{what} cannot be read as parquet: {error}; how many records are lost is unknown",
            error_class="integrity",
            shard=self.stamp.path,
            offset=offset,
        )

    def _error(self, reason: str) -> DataError:
        return DataError(reason, error_class="integrity", shard=self.stamp.path)
