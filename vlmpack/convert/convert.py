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
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from vlmpack.convert.settings import ConvertSettings
from vlmpack.convert.shards import ShardFolder, WrittenShard
from vlmpack.data.columns.chat import ChatTurns, chat_turns
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.files.records import Record
from vlmpack.data.shards.keys import count_keys
from vlmpack.data.shards.naming import JSON_FIELD
from vlmpack.data.shards.schemas import cook_texts
from vlmpack.encode import Encoder
from vlmpack.errors import DataError, EmptyDataError, VlmpackError, schema_error
from vlmpack.whole_file import write_atomically

MANIFEST_RULE = "convert-2"
KEY_DIGITS = 9

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
    """

    records: int
    shards: tuple[WrittenShard, ...]
    skipped: tuple[SkippedRecord, ...]
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    placed: int = 0

    @property
    def samples(self) -> int:
        """Samples that were written."""
        return sum(shard.samples for shard in self.shards)


def convert(
    records: Iterable[Record], settings: ConvertSettings, progress: Progress | None = None
) -> ConvertReport:
    """Write the records as shards, with their index.

    Raises:
        DataError: the first record that cannot be used, unless `skip_bad`.
        EmptyDataError: not one record can be used.
        VlmpackError: the folder holds shards of that name already, or cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", settings.prefix):
        raise VlmpackError(
            f"OUT: the shards' name {settings.prefix!r}; expected letters, digits, '-' and '_'"
        )
    shards = ShardFolder(settings)
    manifest = settings.folder / f"{settings.prefix}-manifest.json"
    shards.prepare()
    manifest.unlink(missing_ok=True)
    skipped: list[SkippedRecord] = []
    unknown: Counter[str] = Counter()
    images = ImageRoot(settings.image_root, settings.caps)
    number = written = placed = 0
    try:
        for number, record in enumerate(records, start=1):
            try:
                fields, turns = sample_fields(record, number - 1, images, settings.encoder)
            except DataError as error:
                if not settings.skip_bad:
                    raise DataError(
                        f"{record.place}: {error.reason}; repair it, or leave bad records out by "
                        "--skip-bad",
                        error_class=error.error_class,
                    ) from None
                skipped.append(SkippedRecord(record.place, error.error_class, error.reason))
                continue
            shards.write(_key(number - 1), fields)
            unknown.update((*turns.unknown_keys, *record.unread))
            placed += turns.placed
            written += 1
            if progress is not None:
                progress(number, written)
        shards.close()
    except OSError as error:
        raise VlmpackError(f"{settings.folder} cannot be written: {error}") from error
    finally:
        shards.abandon()
        if isinstance(records, Generator):
            records.close()  # with its file, which the fault's traceback would keep open
    report = ConvertReport(
        number, tuple(shards.shards), tuple(skipped), count_keys([unknown]), placed
    )
    if not report.samples:
        first = f"; the first: {skipped[0].place}: {skipped[0].reason}" if skipped else ""
        raise EmptyDataError(f"none of {number} records can be used{first}")
    _write_manifest(manifest, report)
    return report


def sample_fields(
    record: Record, number: int, images: ImageRoot, encoder: Encoder | None = None
) -> tuple[dict[str, bytes], ChatTurns]:
    """The members of one sample (the JSON, and images as 0.jpg, 1.png, ...), and what was read of
    its record.

    Raises:
        DataError: class `schema`, `integrity` or `decode`; the reason has no place.
    """
    if record.value is None:
        raise schema_error(record.fault or "cannot be read")
    turns = chat_turns(record.value)
    loaded = [images.load(source) for source in turns.images]
    if len(loaded) > images.caps.max_images:
        raise schema_error(f"{len(loaded)} images; at most {images.caps.max_images} are allowed")
    names = tuple(f"{place}.{image.suffix}" for place, image in enumerate(loaded))
    document = turns.document(names)
    if isinstance(record.value.get("id"), (str, int)):
        document["id"] = record.value["id"]
    if record.value.get("task") is not None:
        document["task"] = record.value["task"]
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise schema_error("a text has half of a surrogate pair, which is no text") from None
    texts = cook_texts(_key(number), "", data, (JSON_FIELD, *names))
    assert texts[0].image_fields == names, (texts[0].image_fields, names)
    if encoder is not None:
        paths = tuple(
            s if isinstance(s, str) else n for s, n in zip(turns.images, names, strict=True)
        )
        for cooked in texts:
            sample = replace(cooked.sample, image_names=paths)
            encoder.measure(sample, [image.size for image in loaded])
    members = {name: image.data for name, image in zip(names, loaded, strict=True)}
    return {JSON_FIELD: data} | members, turns


def _key(number: int) -> str:
    """The record's number: skipped records leave gaps, so a key leads back to its record."""
    return str(number).zfill(KEY_DIGITS)


def _write_manifest(path: Path, report: ConvertReport) -> None:
    content = {"format": MANIFEST_RULE, "samples": report.samples, **asdict(report)}
    write_atomically(path, json.dumps(content, indent=1) + "\n")
