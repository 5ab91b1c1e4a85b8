"""The conversion: record -> turns and images -> a sample that our own reader accepts -> shards.

Every sample is read back by the reader's rules before it is written, so what is converted can be
trained. A record that cannot be used ends the conversion, or is left out and listed where
`skip_bad` is set. When all is written, PREFIX-manifest.json says so: shards without it are those of
a conversion that did not finish.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from vlmpack.convert.frames import require_pyav
from vlmpack.convert.settings import ConvertSettings
from vlmpack.convert.shards import ShardFolder, WrittenShard
from vlmpack.convert.videos import VideoReader
from vlmpack.data.columns.chat import ChatTurns
from vlmpack.data.columns.form import AS_TURNS, RecordForm, find_form
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.files.records import OpenRecords, Record
from vlmpack.data.files.samples import record_number_key, sample_of
from vlmpack.data.files.source_form import refuse_dropped_images
from vlmpack.data.shards.images import image_facts
from vlmpack.data.shards.keys import count_keys
from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps
from vlmpack.data.shards.schemas import cook_texts
from vlmpack.data.shards.tar import BLOCK_BYTES, padded_size
from vlmpack.encode import Encoder, decode_image
from vlmpack.encode.sample import VideoPart, shown_by
from vlmpack.errors import DataError, EmptyDataError, RecipeError, VlmpackError, schema_error
from vlmpack.file_format import CONVERSION
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted

FIRST_RECORDS = 64
"""Records that settle the layout of their source."""

Progress = Callable[[int, int], None]
"""Called with the records read and the samples written so far."""


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """A record that was left out."""

    place: str
    error_class: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did.

    Args:
        records: read.
        shards: written, in order.
        skipped: records that were left out.
        unknown_keys: keys of the records that were not read -> records.
        placed: samples whose images were put before the first text of the user, since nothing in
            their records says where they stand.
        layout: what the records were read as.
        videos: in the samples.
        frames: of these.
    """

    records: int
    shards: tuple[WrittenShard, ...]
    skipped: tuple[SkippedRecord, ...]
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    placed: int = 0
    layout: str = ""
    videos: int = 0
    frames: int = 0

    @property
    def samples(self) -> int:
        """Samples that were written."""
        return sum(shard.samples for shard in self.shards)


def convert(
    records: Iterable[Record], settings: ConvertSettings, progress: Progress | None = None
) -> ConvertReport:
    """Write the records as shards, with their index.

    Args:
        records: of one source; the first of them settle how all are read.
        settings: where to, and what is allowed.
        progress: is told how far it is.

    Raises:
        DataError: the first record that cannot be used, unless `skip_bad`.
        EmptyDataError: not one record can be used.
        VlmpackError: the folder holds shards of that name already, or cannot be written; no
            layout fits the records, or more than one.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", settings.prefix):
        raise VlmpackError(
            f"OUT: the shards' name {settings.prefix!r}; expected letters, digits, '-' and '_'"
        )
    shards = ShardFolder(settings)
    tally = _Tally()
    images = ImageRoot(str(settings.image_root), settings.caps)
    videos = _video_reader(images, settings)
    number = 0
    stream = iter(records)
    try:
        begin = list(islice(stream, FIRST_RECORDS))
        form = _form_of(begin, settings, records)
        shards.prepare()
        for number, record in enumerate(chain(begin, stream), start=1):
            try:
                fields, turns = sample_fields(
                    record, number - 1, images, form, settings.encoder, videos
                )
            except DataError as error:
                if not settings.skip_bad:
                    raise DataError(
                        f"{record.place}: {error.reason}; repair it, or leave bad records out by "
                        "--skip-bad",
                        error_class=error.error_class,
                    ) from None
                tally.skip(record, error)
                continue
            shards.write(record_number_key(number - 1), fields)
            tally.write(turns, form.unread(record.unread))
            if progress is not None:
                progress(number, tally.written)
        shards.close()
    except OSError as error:
        raise VlmpackError(f"{settings.folder} cannot be written: {error}") from error
    finally:
        shards.abandon()
        if isinstance(stream, Generator):
            stream.close()  # with its file, which the fault's traceback would keep open
    report = tally.report(number, shards.shards, form)
    if not report.samples:
        first = report.skipped[:1]
        said = f"; the first: {first[0].place}: {first[0].reason}" if first else ""
        raise EmptyDataError(f"none of {number} records can be used{said}")
    _write_manifest(shards.manifest, report)
    return report


@dataclass(slots=True)
class _Tally:
    """What became of the records so far."""

    written: int = 0
    placed: int = 0
    skipped: list[SkippedRecord] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    videos: list[int] = field(default_factory=list)

    def skip(self, record: Record, error: DataError) -> None:
        """A record was left out."""
        self.skipped.append(SkippedRecord(record.place, error.error_class, error.reason))

    def write(self, turns: ChatTurns, unread: Sequence[str]) -> None:
        """A record was written.

        Args:
            turns: of it.
            unread: columns of its table that were not looked at.
        """
        self.written += 1
        self.placed += turns.placed
        self.unknown.update((*turns.unknown_keys, *unread))
        shown = shown_by(turns.turns)
        self.videos += [len(part.times) for part in shown if isinstance(part, VideoPart)]

    def report(
        self, records: int, shards: Sequence[WrittenShard], form: RecordForm
    ) -> ConvertReport:
        """The whole conversion."""
        return ConvertReport(
            records,
            tuple(shards),
            tuple(self.skipped),
            count_keys([self.unknown]),
            self.placed,
            layout=form.words,
            videos=len(self.videos),
            frames=sum(self.videos),
        )


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
    """The members of one sample (the JSON, and images as 0.jpg, 1.png, ...), and what was read of
    its record.

    Args:
        record: as its file has it.
        number: its place in the source, which becomes the sample's key.
        images: where its images are.
        form: how it is read.
        encoder: measures it.
        videos: decodes its containers; None: they are refused.

    Raises:
        DataError: class `schema`, `integrity` or `decode`; the reason has no place.
    """
    if record.value is None:
        raise record.fault or schema_error("cannot be read")
    sample = sample_of(record.value, form, images, rewrite=videos)
    facts = [image_facts(image.data, image.name, images.caps) for image in sample.images]
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
        raise DataError(
            f"the sample would have {counted(len(members), 'member')} and {held} bytes; at most "
            f"{caps.max_sample_bytes} are read",
            error_class="integrity",
        )
    if len(members[JSON_FIELD]) > caps.max_json_bytes:
        raise DataError(
            f"the conversation would have {len(members[JSON_FIELD])} bytes; at most "
            f"{caps.max_json_bytes} are read",
            error_class="integrity",
        )


def _video_reader(images: ImageRoot, settings: ConvertSettings) -> VideoReader | None:
    """What decodes the records' videos.

    Raises:
        CapabilityError: PyAV is not installed.
    """
    if settings.videos is None:
        return None
    require_pyav()  # before any record is read
    return VideoReader(images, settings.videos)


def _write_manifest(path: Path, report: ConvertReport) -> None:
    content = {"samples": report.samples, **asdict(report)}
    write_atomically(path, json.dumps(CONVERSION.mark(content), indent=1) + "\n")
