"""A record of a file -> a sample as a shard would hold it: JSON, and images as members.

A record is read as if `vlmpack data convert` had made shards of it, with the same names and bytes.
So later code sees only samples. `RecordFiles` reads samples by their places and keeps files open.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from vlmpack.addresses import is_remote, record_kind
from vlmpack.data.columns.chat import ChatTurns, Rewrite
from vlmpack.data.columns.form import RecordForm, read_columns, read_turns
from vlmpack.data.files.form import FileForm
from vlmpack.data.files.images import ImageRoot, LoadedImage
from vlmpack.data.files.record import Place, Record, RecordFile
from vlmpack.data.files.records import open_file
from vlmpack.data.files.registered import function_of, rewritten
from vlmpack.data.files.tables import KeptRows
from vlmpack.data.files.texts import JsonLines, Lines
from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps, as_utf8, is_image
from vlmpack.data.shards.samples import REINDEX, RawSample
from vlmpack.data.shards.tar import TarMember
from vlmpack.data.shards.turns import Conversation
from vlmpack.encode.decode import suffix_of
from vlmpack.encode.rollouts import Rollout
from vlmpack.encode.sample import NO_INPUTS, shown_by
from vlmpack.errors import DataError, integrity_error, or_error, or_raise
from vlmpack.storage.fetch import Fetcher, ShardStamp, at_once, most_open_files

MAX_OPEN_FILES = 16
"""Least recently used closed first, with the row groups that they keep."""
RECORDS_AT_ONCE = 64
"""Records whose images in a store are asked for together when a file is indexed."""
KEY_DIGITS = 9
_WRITE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class RecordFiles:
    """Reads samples of files; picklable, sent to a worker without what is open."""

    fetcher: Fetcher
    caps: SampleCaps = field(default_factory=SampleCaps)
    _open: OrderedDict[tuple[ShardStamp, str], RecordFile] = field(
        default_factory=OrderedDict, repr=False, compare=False
    )
    _rows: KeptRows = field(default_factory=KeptRows, repr=False, compare=False)
    _roots: dict[str, ImageRoot] = field(default_factory=dict, repr=False, compare=False)

    def is_parted(self, stamp: ShardStamp, num_bytes: int) -> bool:
        """Whether `pieces` has several: a file of JSONL on a disk of more than two such pieces,
        which no function rewrites."""
        is_large = record_kind(stamp.path) == "JSONL" and stamp.size > 2 * num_bytes
        if not is_large or is_remote(stamp.path):  # which would be sent twice
            return False
        return stamp.holds_records and not FileForm.from_text(stamp.form).function

    def pieces(self, stamp: ShardStamp, num_bytes: int) -> list[Lines | None]:
        """What `samples` can be asked for one by one: lines of a file, of about so many bytes; None
        for all of it.

        Raises:
            DataError: as `samples`.
        """
        if not self.is_parted(stamp, num_bytes):
            return [None]
        try:
            return [*JsonLines(self.fetcher, stamp, self.caps).pieces(num_bytes)] or [None]
        except DataError as error:
            raise error.located(shard=stamp.path) from None

    def samples(self, stamp: ShardStamp, lines: Lines | None = None) -> Iterator[RawSample]:
        """All samples of a file, in its order, or those of some of its lines.

        Raises:
            DataError: as RecordFile.scan, and class `transport` for an image out of reach.
        """
        form = FileForm.from_text(stamp.form)
        file = self._made(stamp, form)
        if lines is not None:
            assert isinstance(file, JsonLines)
            file.lines = lines
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
        """The samples at some places of a file, in that order."""
        form = FileForm.from_text(stamp.form)
        root, function = self._root(stamp, form), function_of(self.fetcher, stamp.form)

        def sample(record: Record | DataError, stamps: Sequence[ShardStamp]) -> RawSample:
            made = rewritten(or_raise(record), function)
            return raw_sample(made, stamp, form.record, root, stamps)

        records = self._kept(stamp, form).read(places)
        return [or_error(sample, *each) for each in zip(records, images, strict=True)]

    def documents(
        self, stamp: ShardStamp, places: Sequence[Place], fields: Sequence[Sequence[str]]
    ) -> list[bytes | DataError]:
        """The JSON of samples, without their images."""
        form, function = FileForm.from_text(stamp.form), function_of(self.fetcher, stamp.form)

        def document(record: Record | DataError, names: Sequence[str]) -> bytes:
            return text_document(rewritten(or_raise(record), function), form.record, names)

        records = self._kept(stamp, form).read(places)
        return [or_error(document, *each) for each in zip(records, fields, strict=True)]

    def numbers(self, stamp: ShardStamp) -> Iterator[int]:
        """The numbers of all records of a file, of a table without looking at a column.

        Raises:
            DataError: as RecordFile.scan.
        """
        file = open_file(self.fetcher, stamp, self.caps, lambda names: (), is_bounded=False)
        with closing(file):
            yield from (record.place.number for record in file.scan())

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


@dataclass(frozen=True, slots=True)
class RecordSample:
    """A record as a sample, its images in token order under their names there (0.jpg, 1.png
    ...)."""

    document: bytes
    images: tuple[LoadedImage, ...]
    names: tuple[str, ...]
    turns: ChatTurns

    @property
    def members(self) -> dict[str, bytes]:
        """The members by name, as a shard has them."""
        images = {n: image.data for n, image in zip(self.names, self.images, strict=True)}
        return {JSON_FIELD: self.document} | images


def member_names(images: Sequence[LoadedImage]) -> tuple[str, ...]:
    """Names of images in a sample: their number, and an end by what they are."""
    return tuple(f"{place}.{suffix_of(image.data)}" for place, image in enumerate(images))


def sample_of(
    value: Mapping[str, Any],
    form: RecordForm,
    images: ImageRoot,
    stamps: Sequence[ShardStamp] = (),
    rewrite: Rewrite | None = None,
) -> RecordSample:
    """A record's sample, with its images.

    Raises:
        DataError: class `schema` for what the record says, else as ImageRoot.load_all. What
            `rewrite` raises.
    """
    turns = read_turns(value, form, rewrite)
    images.caps.check_images(shown_by(turns.turns))
    loaded = tuple(images.load_all(turns.images, stamps))
    names = member_names(loaded)
    return RecordSample(document_of(value, turns, names), loaded, names, turns)


def document_of(value: Mapping[str, Any], turns: ChatTurns, names: Sequence[str]) -> bytes:
    """A record's JSON as a shard has it, its images under these names.

    Raises:
        DataError: class `schema` for a text that is none.
    """
    document = turns.document(names)
    if isinstance(value.get("id"), (str, int)):
        document["id"] = value["id"]
    if value.get("task") is not None:
        document["task"] = value["task"]
    return as_utf8(_WRITE(document), "a text")


def raw_sample(
    record: Record,
    stamp: ShardStamp,
    form: RecordForm,
    images: ImageRoot,
    stamps: Sequence[ShardStamp] = (),
) -> RawSample:
    """A record as the reader of a shard returns it. Its errors become its fault.

    Raises:
        DataError: class `transport`: an image of a store that is out of reach says nothing about
            the record.
    """
    place = record.place
    try:
        if record.value is None:
            assert record.fault is not None
            raise record.fault
        sample = sample_of(record.value, form, images, stamps)
    except DataError as fault:
        if fault.error_class == "transport":
            raise
        bad = {"fault": fault.reason, "error_class": fault.error_class}
        return _raw(place, stamp, **bad, rollout=_rollout_in(record, form))
    crc32, members = 0, sample.members
    for data in members.values():
        crc32 = zlib.crc32(data, crc32)
    shown = {
        name: image.path
        for name, image in zip(sample.names, sample.images, strict=True)
        if image.path is not None
    }
    return _raw(
        place,
        stamp,
        crc32=crc32,
        members=tuple(_member(place, name, data) for name, data in members.items()),
        said=_said(record.value, sample),
        shown=shown,
        image_stamps=tuple(image.stamp for image in sample.images if image.stamp is not None),
        unknown_keys=(*sample.turns.unknown_keys, *form.unused(record.unused)),
    )


def _rollout_in(record: Record, form: RecordForm) -> Rollout | None:
    try:
        return None if record.value is None else read_turns(record.value, form).rollout
    except DataError:
        return None


def _said(value: Mapping[str, Any], sample: RecordSample) -> Conversation[str] | None:
    """What `document_of` wrote, without parsing it again. None for records that hold more than
    turns and images."""
    turns = sample.turns
    is_more = turns.answers or turns.branches or value.get("task") is not None
    is_more = is_more or not all(turn.parts for turn in turns.turns)
    if is_more or turns.inputs != NO_INPUTS:
        return None
    return Conversation(
        turns.turns, sample.names, (), NO_INPUTS, objects=turns.objects, rollout=turns.rollout
    )


def text_document(record: Record, form: RecordForm, fields: Sequence[str]) -> bytes:
    """A record's JSON without reading its images.

    Raises:
        DataError: class `schema`, or the record's own fault.
    """
    if record.value is None:
        assert record.fault is not None
        raise record.fault
    turns = read_turns(record.value, form)
    names = [name for name in fields if is_image(name)]
    if len(names) != len(turns.images):
        raise integrity_error(
            f"the record names {len(turns.images)} images, and {len(names)} when it was indexed; "
            f"{REINDEX}"
        )
    return document_of(record.value, turns, names)


def record_number_key(number: int) -> str:
    """The key of a record that has none: its number in its file, counted from 0."""
    return f"{number:0{KEY_DIGITS}d}"


def place_of_key(key: str, offset: int, length: int, row: int) -> Place:
    """The place of a record whose key is its number."""
    return Place(int(key), offset, length, row)


def _raw(place: Place, stamp: ShardStamp, **facts: Any) -> RawSample:
    return RawSample(
        key=record_number_key(place.number),
        shard=stamp.path,
        offset=place.offset,
        length=place.length,
        row=place.row,
        **{"crc32": 0, "members": (), "fault": None, **facts},
    )


def _member(place: Place, name: str, data: bytes) -> TarMember:
    return TarMember(
        key=record_number_key(place.number),
        field=name,
        offset=place.offset,
        end=place.offset + place.length,
        data_offset=place.offset,
        size=len(data),
        data=data,
        crc32=0,
    )
