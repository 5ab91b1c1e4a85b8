"""The conversion: record -> turns and images -> a sample that our own reader accepts -> shards.

Every sample is read back by the reader's rules before it is written, so what is converted can be
trained. A record that cannot be used ends the conversion, or is left out and listed where
`skip_bad` is set. Each shard is written under a temporary name, synced, renamed, then indexed.
PREFIX-manifest.json comes last. Shards without it belong to an unfinished conversion.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from vlmpack.convert.videos import VideoReader, VideoSettings, require_pyav
from vlmpack.data.columns.chat import ChatTurns
from vlmpack.data.columns.form import AS_TURNS, RecordForm, find_form
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.files.records import OpenRecords, Record
from vlmpack.data.files.samples import record_number_key, sample_of
from vlmpack.data.files.source_form import refuse_dropped_images
from vlmpack.data.index.parts import part_for
from vlmpack.data.index.shard_index import IndexBuilder, load_index
from vlmpack.data.shards.images import image_facts
from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps, count_keys
from vlmpack.data.shards.samples import cook_texts
from vlmpack.data.shards.tar import BLOCK_BYTES, padded_size
from vlmpack.data.shards.writer import ShardWriter
from vlmpack.encode import Encoder, decode_image
from vlmpack.encode.sample import VideoPart, shown_by
from vlmpack.errors import (
    DataError,
    EmptyDataError,
    RecipeError,
    VlmpackError,
    integrity_error,
    schema_error,
    writing,
)
from vlmpack.file_format import CONVERSION
from vlmpack.storage.access import default_cache_dir
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.whole_file import sync_folder, write_atomically
from vlmpack.words import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertSettings:
    """Where a conversion reads and writes."""

    folder: Path
    """Where the shards go."""
    image_root: Path
    """Every image path must end inside it."""
    layout: Mapping[str, str] | str | None = None
    """The layout of the records, by name or role by role; None: the one that fits."""
    ignored: tuple[str, ...] = ()
    """Columns that are left out."""
    prefix: str = "train"
    """Shards are named PREFIX-000000.tar and so on."""
    max_shard_bytes: int = 256 << 20
    """A shard is closed when it holds so much."""
    max_shard_samples: int = 100_000
    """Or so many samples."""
    skip_bad: bool = False
    """Leave bad records out instead of stopping at the first."""
    overwrite: bool = False
    """Replace shards of the same prefix."""
    index_dir: Path = field(default_factory=default_cache_dir)
    """Where the index goes."""
    caps: SampleCaps = field(default_factory=SampleCaps)
    """Limits of one sample."""
    encoder: Encoder | None = None
    """Measures each sample for a model: what training would refuse is a bad record."""
    videos: VideoSettings | None = None
    """Decode containers of videos to frames; None: records that name one are refused."""


PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """One finished shard."""

    name: str
    samples: int
    num_bytes: int


class ShardFolder:
    """Writes the shards `PREFIX-000000.tar`, ... of one folder."""

    def __init__(self, settings: ConvertSettings) -> None:
        self.settings = settings
        self.folder, self.prefix = settings.folder, settings.prefix
        self.manifest = self.folder / f"{self.prefix}-manifest.json"
        self.builder = IndexBuilder(LocalFetcher(), settings.caps)
        self.shards: list[WrittenShard] = []
        self._tar: ShardWriter | None = None
        self._stream: BinaryIO | None = None
        self._samples = self._bytes = 0

    def existing(self) -> list[Path]:
        """Shards of this prefix, finished or not, and their manifest. Other files with such a name
        do not count."""
        shard = re.escape(self.prefix) + r"-\d{6,}\.tar"
        manifest = re.escape(self.manifest.name)
        ours = re.compile(rf"{shard}|\.{shard}{re.escape(PARTIAL)}|{manifest}", re.ASCII)
        return sorted(path for path in self.folder.glob("*") if ours.fullmatch(path.name))

    def prepare(self) -> None:
        """Make the folder. No other shards of the prefix may be there, unless they may be
        overwritten.

        Raises:
            VlmpackError: there are some and none may be overwritten, or the folder cannot be made.
        """
        files = self.existing()
        if files and not self.settings.overwrite:
            raise VlmpackError(
                f"{self.folder} holds {counted(len(files), 'file')} named {self.prefix}-*, perhaps "
                "of an unfinished conversion; choose another OUT, or --overwrite"
            )
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in files:
                path.unlink()

    def write(self, key: str, fields: dict[str, bytes]) -> None:
        """Append one sample, its members by name."""
        most = self.settings
        if self._samples >= most.max_shard_samples or self._bytes >= most.max_shard_bytes:
            self.close()
        if self._tar is None:
            path = self.folder / f".{self._name()}{PARTIAL}"
            self._stream = path.open("xb")
            self._tar = ShardWriter(self._stream)
        self._tar.write(key, fields)
        self._bytes += sum(map(len, fields.values()))
        self._samples += 1

    def close(self) -> None:
        """Finish the last shard."""
        if self._tar is not None:
            self._tar.close()
            self._finish(self._name())
            self._tar = None
            self._samples = self._bytes = 0

    def abandon(self) -> None:
        """Drop the unfinished shard; finished ones stay."""
        if self._stream is not None:
            if self._tar is not None:
                with suppress(OSError):  # a full disk takes no end either
                    self._tar.close()
            self._stream.close()
            Path(self._stream.name).unlink(missing_ok=True)
            self._stream = None

    def _name(self) -> str:
        return f"{self.prefix}-{len(self.shards):06d}.tar"

    def _finish(self, name: str) -> None:
        """Put the closed tar on disk under its own name, with its index next to it."""
        assert self._stream is not None
        path = (self.folder / name).absolute()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        Path(self._stream.name).rename(path)
        self._stream = None
        sync_folder(path.parent)
        stamp = LocalFetcher().head(str(path))
        part = part_for(self.settings.index_dir, stamp, self.builder.rule)
        self.settings.index_dir.mkdir(parents=True, exist_ok=True)
        self.builder(part)
        table = load_index(part, self.builder).table
        reasons = table.column("reason").drop_null()
        assert not len(reasons), f"a converted sample is bad: {reasons[0]}"
        self.shards.append(WrittenShard(path.name, table.num_rows, stamp.size))


FIRST_RECORDS = 64
"""Records that decide the layout of their source."""

Progress = Callable[[int, int], None]
"""Called with the records read and the samples written so far."""


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """A record that was left out."""

    place: str
    error_class: str
    reason: str


@dataclass(slots=True)
class ConvertReport:
    """What a conversion did, or has done so far.

    Args:
        shards: in order.
        skipped: records that were left out.
        unknown_keys: keys of the records that were not read -> records.
        put_first: samples whose images were put before the first text of the user, since their
            records do not say where.
        layout: what the records were read as.
        frames: of the videos.
    """

    records: int = 0
    shards: list[WrittenShard] = field(default_factory=list)
    skipped: list[SkippedRecord] = field(default_factory=list)
    unknown_keys: dict[str, int] = field(default_factory=Counter)
    put_first: int = 0
    layout: str = ""
    videos: int = 0
    frames: int = 0

    @property
    def samples(self) -> int:
        """Samples in finished shards."""
        return sum(shard.samples for shard in self.shards)

    def add(self, turns: ChatTurns, unused: Sequence[str]) -> None:
        """A record was written."""
        self.put_first += turns.put_first
        for key in (*turns.unknown_keys, *unused):
            self.unknown_keys[key] += 1
        for part in shown_by(turns.turns):
            if isinstance(part, VideoPart):
                self.videos += 1
                self.frames += len(part.times)


def convert(
    records: Iterable[Record], settings: ConvertSettings, progress: Progress | None = None
) -> ConvertReport:
    """Write the records of one source as shards with their index. The first records decide how all
    are read.

    Raises:
        DataError: the first record that cannot be used, unless `skip_bad`.
        EmptyDataError: not one record can be used.
        VlmpackError: the folder holds shards of that name already, or cannot be written; no layout
            fits the records, or more than one.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", settings.prefix):
        raise VlmpackError(
            f"OUT: the shards' name {settings.prefix!r}; expected letters, digits, '-' and '_'"
        )
    shards = ShardFolder(settings)
    report = ConvertReport()
    images = ImageRoot(str(settings.image_root), settings.caps)
    videos = _video_reader(images, settings)
    stream = iter(records)
    try:
        first_records = list(islice(stream, FIRST_RECORDS))
        form = _form_of(first_records, settings, records)
        shards.prepare()
        for number, record in enumerate(chain(first_records, stream)):
            report.records += 1
            try:
                fields, turns = sample_fields(
                    record, number, images, form, settings.encoder, videos
                )
            except DataError as error:
                if not settings.skip_bad:
                    raise DataError(
                        f"{record.place}: {error.reason}; repair it, or leave bad records out by "
                        "--skip-bad",
                        error_class=error.error_class,
                    ) from None
                report.skipped.append(SkippedRecord(record.place, error.error_class, error.reason))
                continue
            shards.write(record_number_key(number), fields)
            report.add(turns, form.unused(record.unused))
            if progress is not None:
                progress(report.records, report.records - len(report.skipped))
        shards.close()
    except OSError as error:
        raise VlmpackError(f"{settings.folder} cannot be written: {error}") from error
    finally:
        shards.abandon()
        if isinstance(stream, Generator):
            stream.close()  # with its file, which the fault's traceback would keep open
    report.shards, report.layout = shards.shards, form.words
    report.unknown_keys = count_keys([report.unknown_keys])
    if not report.samples:
        first = report.skipped[:1]
        said = f"; the first: {first[0].place}: {first[0].reason}" if first else ""
        raise EmptyDataError(f"none of {report.records} records can be used{said}")
    content = CONVERSION.mark({"samples": report.samples, **asdict(report)})
    write_atomically(shards.manifest, json.dumps(content, indent=1) + "\n")
    return report


def _form_of(
    first: Sequence[Record], settings: ConvertSettings, records: Iterable[Record]
) -> RecordForm:
    """How the records are read."""
    values = [record.value for record in first if record.value is not None]
    where = f"the records from {first[0].place} on" if first else "the source"
    try:
        form = find_form(values, settings.layout, where, "--columns", settings.ignored)
        if isinstance(records, OpenRecords):
            refuse_dropped_images(records.values, values, form, where)
        return form
    except RecipeError as error:  # there is no recipe here
        raise VlmpackError("; ".join(error.problems)) from None


def sample_fields(
    record: Record,
    number: int,
    images: ImageRoot,
    form: RecordForm = AS_TURNS,
    encoder: Encoder | None = None,
    videos: VideoReader | None = None,
) -> tuple[dict[str, bytes], ChatTurns]:
    """The members of one sample (the JSON, and images as 0.jpg, 1.png, ...), and its record's
    turns.

    Args:
        number: its place in the source, which becomes the sample's key.
        videos: decodes its containers. With None they are refused.

    Raises:
        DataError: class `schema`, `integrity` or `decode`; the reason has no place.
    """
    if record.value is None:
        raise record.fault or schema_error("cannot be read")
    sample = sample_of(record.value, form, images, rewrite=videos)
    facts = [image_facts(image.data, image.name, images.caps) for image in sample.images]
    if record.size is not None and record.size != facts[0].size:
        width, height = facts[0].size
        said = " x ".join(map(str, record.size))
        raise schema_error(
            f"its boxes are on an image of {said} pixels, and {sample.images[0].name!r} has "
            f"{width} x {height} as it is seen (after EXIF rotation); expected the image that the "
            "boxes were drawn on"
        )
    for image in sample.images:  # one that is cut has a sound header
        decode_image(image.data, repr(image.name), max_pixels=images.caps.max_image_pixels)
    _check_size(sample.members, images.caps)
    names = sample.names
    texts = cook_texts(record_number_key(number), "", sample.document, (JSON_FIELD, *names))
    assert texts[0].image_fields == names, (texts[0].image_fields, names)
    if encoder is not None:
        shown = tuple(image.name for image in sample.images)
        for cooked in texts:
            encoder.measure(replace(cooked.sample, image_names=shown), [f.size for f in facts])
    return sample.members, sample.turns


def _check_size(members: Mapping[str, bytes], caps: SampleCaps) -> None:
    """Raise DataError (integrity) for a sample that no reader of shards would take."""
    held = sum(BLOCK_BYTES + padded_size(len(data)) for data in members.values())
    if held > caps.max_sample_bytes:
        raise integrity_error(
            f"the sample would have {counted(len(members), 'member')} and {held} bytes; at most "
            f"{caps.max_sample_bytes} are read"
        )
    if len(members[JSON_FIELD]) > caps.max_json_bytes:
        raise integrity_error(
            f"the conversation would have {len(members[JSON_FIELD])} bytes; at most "
            f"{caps.max_json_bytes} are read"
        )


def _video_reader(images: ImageRoot, settings: ConvertSettings) -> VideoReader | None:
    if settings.videos is None:
        return None
    require_pyav()  # before any record is read
    return VideoReader(images, settings.videos)
