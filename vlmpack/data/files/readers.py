"""Files that are no shards, opened by their kind and kept open; samples of them by their places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from vlmpack.addresses import PYTHON, is_remote, record_kind, registered_name
from vlmpack.data.columns.form import read_columns
from vlmpack.data.files.arrow_rows import ArrowRows
from vlmpack.data.files.csv_rows import CsvRows
from vlmpack.data.files.form import FileForm
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.files.json_items import JsonItems
from vlmpack.data.files.json_lines import JsonLines
from vlmpack.data.files.kept_rows import KeptRows
from vlmpack.data.files.parquet_rows import ChooseColumns, ParquetRows
from vlmpack.data.files.record import Place, Record, RecordFile
from vlmpack.data.files.registered import (
    PythonRows,
    function_of,
    registered_of,
    rewritten,
)
from vlmpack.data.files.samples import raw_sample, text_document
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.raw import RawSample
from vlmpack.errors import DataError
from vlmpack.storage.fetch import Fetcher, ShardStamp, at_once, most_open_files

MAX_OPEN_FILES = 16
"""Least recently used closed first, with the row groups that they keep."""
RECORDS_AT_ONCE = 64
"""Records whose images in a store are asked for together when a file is indexed."""

TEXTS: Mapping[str, Callable[[Fetcher, ShardStamp, SampleCaps], RecordFile]] = {
    "JSONL": JsonLines,
    "JSON": JsonItems,
    "CSV": CsvRows,
    "TSV": partial(CsvRows, delimiter="\t"),
}
TABLES: Mapping[str, type[ParquetRows] | type[ArrowRows]] = {
    "parquet": ParquetRows,
    "arrow": ArrowRows,
}
"""Kind of a file (`addresses.RECORD_FILES`) -> what reads it, here and above."""


def open_file(
    fetcher: Fetcher,
    stamp: ShardStamp,
    caps: SampleCaps,
    choose: ChooseColumns,
    *,
    kind: str | None = None,
    is_bounded: bool = True,
    kept: KeptRows | None = None,
) -> RecordFile:
    """The records of a file.

    Args:
        choose: names of a table's columns -> those that are read.
        kind: of the file; None: by its name's end.
        is_bounded: whether a table's large groups of rows are refused; who only scans needs no
            bound.
        kept: where groups of rows are kept that were decoded; None: with the file.
    """
    kind = kind or record_kind(stamp.path)
    assert kind is not None, stamp.path
    if kind == PYTHON:
        name = registered_name(stamp.path)
        return PythonRows(stamp, registered_of(fetcher).sources[name or ""])
    if kind in TEXTS:
        return TEXTS[kind](fetcher, stamp, caps)
    rows = KeptRows() if kept is None else kept
    return TABLES[kind](fetcher, stamp, caps, choose, is_bounded=is_bounded, kept=rows)


@dataclass(slots=True)
class RecordFiles:
    """Reads samples of files; picklable, sent to a worker without what is open.

    Args:
        fetcher: reads bytes.
        caps: limits of one sample.
    """

    fetcher: Fetcher
    caps: SampleCaps = field(default_factory=SampleCaps)
    _open: OrderedDict[tuple[ShardStamp, str], RecordFile] = field(
        default_factory=OrderedDict, repr=False, compare=False
    )
    _rows: KeptRows = field(default_factory=KeptRows, repr=False, compare=False)
    _roots: dict[str, ImageRoot] = field(default_factory=dict, repr=False, compare=False)

    def samples(self, stamp: ShardStamp) -> Iterator[RawSample]:
        """All samples of a file, in its order.

        Raises:
            DataError: as RecordFile.scan, and class `transport` for an image out of reach.
        """
        form = FileForm.from_text(stamp.form)
        file = self._made(stamp, form)
        waiting: list[Record] = []
        at_a_time = RECORDS_AT_ONCE if is_remote(form.root_of(stamp)) else 1
        try:
            for record in file.scan():
                waiting.append(record)
                if len(waiting) >= at_a_time:
                    yield from self._raw(stamp, form, waiting)
                    waiting = []
            yield from self._raw(stamp, form, waiting)
        except DataError as error:
            raise error.located(shard=stamp.path) from None
        finally:
            file.close()

    def read(
        self, stamp: ShardStamp, places: Sequence[Place], images: Sequence[Sequence[ShardStamp]]
    ) -> list[RawSample | DataError]:
        """The samples at some places of a file, in that order.

        Args:
            images: of each, those that lie in a store; empty where none does.
        """
        form = FileForm.from_text(stamp.form)
        root, function = self._root(stamp, form), function_of(self.fetcher, stamp.form)
        found: list[RawSample | DataError] = []
        for record, stamps in zip(self._kept(stamp, form).read(places), images, strict=True):
            try:
                if isinstance(record, DataError):
                    raise record
                record = rewritten(record, function)
                found.append(raw_sample(record, stamp, form.record, root, stamps))
            except DataError as error:
                found.append(error)
        return found

    def documents(
        self, stamp: ShardStamp, places: Sequence[Place], fields: Sequence[Sequence[str]]
    ) -> list[bytes | DataError]:
        """The JSON of samples, without their images.

        Args:
            fields: names of each sample's members.
        """
        form, function = FileForm.from_text(stamp.form), function_of(self.fetcher, stamp.form)
        found: list[bytes | DataError] = []
        for record, names in zip(self._kept(stamp, form).read(places), fields, strict=True):
            try:
                if isinstance(record, DataError):
                    raise record
                found.append(text_document(rewritten(record, function), form.record, names))
            except DataError as error:
                found.append(error)
        return found

    def numbers(self, stamp: ShardStamp) -> Iterator[int]:
        """The numbers of all records of a file, of a table without looking at a column.

        Raises:
            DataError: as RecordFile.scan.
        """
        file = open_file(self.fetcher, stamp, self.caps, lambda names: (), is_bounded=False)
        try:
            yield from (record.place.number for record in file.scan())
        finally:
            file.close()

    def _raw(self, stamp: ShardStamp, form: FileForm, records: Sequence[Record]) -> list[RawSample]:
        root, function = self._root(stamp, form), function_of(self.fetcher, stamp.form)
        return at_once(
            lambda record: raw_sample(record, stamp, form.record, root),
            [rewritten(record, function) for record in records],
            most=RECORDS_AT_ONCE,
        )

    def _root(self, stamp: ShardStamp, form: FileForm) -> ImageRoot:
        path = form.root_of(stamp)
        if path not in self._roots:
            self._roots[path] = ImageRoot(path, self.caps, self.fetcher)
        return self._roots[path]

    def _made(self, stamp: ShardStamp, form: FileForm) -> RecordFile:
        def choose(names: Sequence[str]) -> Sequence[str]:
            return names if form.function else read_columns(form.record, names)

        return open_file(self.fetcher, stamp, self.caps, choose, kept=self._rows)

    def _kept(self, stamp: ShardStamp, form: FileForm) -> RecordFile:
        key = (stamp, stamp.form)
        file = self._open.get(key)
        if file is None:
            while len(self._open) >= most_open_files(MAX_OPEN_FILES):
                self._open.popitem(last=False)[1].close()
            file = self._open[key] = self._made(stamp, form)
        self._open.move_to_end(key)
        return file

    def __reduce__(self) -> tuple[type[RecordFiles], tuple[Fetcher, SampleCaps]]:
        return RecordFiles, (self.fetcher, self.caps)
