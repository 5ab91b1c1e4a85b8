"""The index: one pass over each shard and one row per sample, without decoding pixels.

A record of several samples (branches, or each of its answers) has a row for each. A shard with a
damaged structure is always an error, because nobody can say how many samples are lost. A bad sample
stays in the index as a row with a reason. It becomes a counted hole in the plan, and nothing else
moves.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from tempfile import SpooledTemporaryFile
from typing import Any

import pyarrow as pa

from vlmpack.activity import ACTIVITY
from vlmpack.data.files.samples import RecordFiles
from vlmpack.data.files.shard_samples import shard_samples
from vlmpack.data.files.texts import Lines
from vlmpack.data.forkserver import DEFAULT_PRELOAD
from vlmpack.data.index.held_out import opening_digest
from vlmpack.data.index.parts import (
    BuildSettings,
    Part,
    PartRows,
    PartWriter,
    load_part,
    open_parts,
    part_for,
    part_writer,
)
from vlmpack.data.index.shard_pool import Item, Report, each_shard
from vlmpack.data.shards.images import ImageFacts, image_digest, image_facts
from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps, count_keys
from vlmpack.data.shards.samples import CookedText, RawSample, cook_texts
from vlmpack.encode.rollouts import Rollout
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError, integrity_error
from vlmpack.storage.fetch import Fetcher, ShardStamp

INDEX_RULE = "index-2"
"""Changes whenever a row would differ for the same shard."""

_CONTENT = b"vlmpack.content"
_UNKNOWN_KEYS = b"vlmpack.unknown_keys"
_IMAGE = pa.struct(
    [
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("format", pa.string()),
        ("orientation", pa.int8()),
    ]
)
INDEX_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("branch", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("crc32", pa.uint32()),
        ("fields", pa.list_(pa.string())),
        ("json_offset", pa.int64()),
        ("json_length", pa.int64()),
        ("images", pa.list_(_IMAGE)),
        ("image_digests", pa.list_(pa.int64())),
        ("opening", pa.int64()),
        ("pair", pa.bool_()),
        ("num_turns", pa.int32()),
        ("num_text_bytes", pa.int64()),
        ("error_class", pa.string()),
        ("reason", pa.string()),
    ]
)
"""Columns of a part. `images` and their digests are in token order. `opening` is
`held_out.OPENING`. `pair` marks two answers. `reason` is null for a good sample."""

_STAMP = pa.struct([("path", pa.string()), ("size", pa.int64()), ("version", pa.string())])
RECORD_COLUMNS = (pa.field("row", pa.int32()), pa.field("image_stamps", pa.list_(_STAMP)))
"""More columns for files that are no shards: a record's row within the unit at `offset`, and where
its images lie in a store."""


@dataclass(slots=True)
class IndexRow:
    """One row, in the columns' order."""

    key: str
    branch: int | None
    """Which of its record's samples it is; None where the record is one."""
    offset: int
    length: int
    crc32: int
    fields: tuple[str, ...]
    json_offset: int = 0
    json_length: int = 0
    images: tuple[ImageFacts, ...] = ()
    image_digests: tuple[int, ...] = ()
    opening: int | None = None
    pair: bool = False
    num_turns: int = 0
    num_text_bytes: int = 0
    error_class: str | None = None
    reason: str | None = None
    unknown_keys: tuple[str, ...] = ()
    """Keys of the record that are not read; counted over the shard, no column."""
    row: int | None = None
    image_stamps: tuple[ShardStamp, ...] = ()
    rollout: Rollout | None = None
    """What a sampler said of its answer, of a bad record too; no column."""


NoteRow = Callable[[IndexRow, VLMSample | None], None]
"""Called with each row and, where the sample is good, its conversation without image bytes."""


PIECE_BYTES = 4 << 20
"""A process reads so much of a large file of JSONL at a time."""
GROUP_ROWS = 16_384
"""Most rows of a file of records that are in Python at a time, and of a row group."""
WAITING_BYTES = 1 << 20
"""Text of a column that waits in memory."""

Piece = tuple[Any, Mapping[str, int], Any]
"""A pyarrow table of index rows, the keys of their records that are not read, and the lengths of
those rows where they are measured."""


@dataclass(frozen=True, slots=True)
class IndexBuilder:
    """Makes the index part of one shard; picklable."""

    fetcher: Fetcher
    caps: SampleCaps = field(default_factory=SampleCaps)
    each_answer: bool = False
    processes: int = 1
    """How many read one large file of JSONL. A process of a pool reads alone."""

    @property
    def rule(self) -> str:
        """The rule's name, with what changes its result."""
        caps = self.caps
        rule = f"{INDEX_RULE}-{caps.max_member_bytes}-{caps.max_image_pixels}-{caps.max_images}"
        return rule + ("-each_answer" if self.each_answer else "")

    def __call__(self, part: Part) -> None:
        """Reads the shard once and writes its part.

        Raises:
            DataError: class `integrity` for a damaged shard, `transport` for one out of reach.
        """
        unknown: dict[str, int] = {}
        with (
            part_writer(part.path) as index,
            self.lengths_writer(part.stamp) as lengths,
            ContentDigest() as content,
        ):
            for table, keys, measured in self.read(part.stamp):
                index.add(table)
                content.add(table)
                unknown = count_keys((unknown, keys))
                if lengths is not None:
                    lengths.add(measured)
            facts = {_CONTENT: content.hexdigest(), _UNKNOWN_KEYS: json.dumps(unknown)}
            index.facts |= {name: text.encode() for name, text in facts.items()}

    def lengths_writer(self, stamp: ShardStamp) -> AbstractContextManager[PartWriter | None]:
        """Writes the lengths of a shard, which are there before the index is."""
        return nullcontext()

    def read(self, stamp: ShardStamp) -> Iterator[Piece]:
        """The shard's pieces in order, read by `processes`.

        Raises:
            DataError: as above.
        """
        parted = RecordFiles(self.fetcher, self.caps).pieces(stamp, PIECE_BYTES)
        if len(parted) == 1:
            yield from self.pieces(stamp, parted[0])
        else:
            for pieces in self.each(partial(self.all_pieces, stamp), parted):
                yield from pieces
        if self.fetcher.head(stamp.path) != stamp:
            raise integrity_error("the shard changed while it was indexed", shard=stamp.path)

    def each(self, work: Callable[[Item], Report], items: Iterable[Item]) -> Iterator[Report]:
        """What `processes` make of items, in order."""
        return each_shard(
            work,
            items,
            processes=self.processes,
            preload=DEFAULT_PRELOAD,
            in_order=True,
            remedy="make the index with fewer processes, by `vlmpack index --processes`",
        )

    def all_pieces(self, stamp: ShardStamp, lines: Lines | None) -> list[Piece]:
        """As `pieces`, of some lines."""
        return [*self.pieces(stamp, lines)]

    def pieces(self, stamp: ShardStamp, lines: Lines | None = None) -> Iterator[Piece]:
        """The rows of a shard, or of a file of records or some of its lines, GROUP_ROWS at a time.
        A shard's are all at once, since its keys may be repeated.

        Raises:
            DataError: as above.
        """
        samples = self.samples(stamp, lines)
        most = GROUP_ROWS - 1 if stamp.holds_records else None
        raw = None
        for raw in samples:
            yield self.piece(stamp, chain([raw], islice(samples, most)))
        if raw is None:
            yield self.piece(stamp, ())

    def piece(self, stamp: ShardStamp, samples: Iterable[RawSample]) -> Piece:
        """The rows of some samples."""
        rows = self.rows(samples)
        return to_table(rows), unknown_keys_of(rows), None

    def samples(self, stamp: ShardStamp, lines: Lines | None = None) -> Iterator[RawSample]:
        """The samples of a shard, or of a file of records or some of its lines, in its order.

        Raises:
            DataError: as above.
        """
        if stamp.holds_records:
            samples = RecordFiles(self.fetcher, self.caps).samples(stamp, lines)
        else:
            samples = shard_samples(self.fetcher, stamp, self.caps)
        for raw in samples:
            ACTIVITY.moved()
            yield raw

    def scan(self, stamp: ShardStamp, note: NoteRow | None = None) -> list[IndexRow]:
        """Reads the shard once.

        Raises:
            DataError: as above.
        """
        return self.rows(self.samples(stamp), note)

    def rows(self, samples: Iterable[RawSample], note: NoteRow | None = None) -> list[IndexRow]:
        """The rows of some samples."""
        rows: list[IndexRow] = []
        for raw in samples:
            rows += index_rows(raw, self.caps, note, each_answer=self.each_answer)
        flag_repeated_keys(rows)
        return rows


def index_rows(
    raw: RawSample, caps: SampleCaps, note: NoteRow | None = None, *, each_answer: bool = False
) -> tuple[IndexRow, ...]:
    """The index rows of one record: one for each of its samples, or one with a reason for a bad
    record."""
    row = IndexRow(raw.key, None, raw.offset, raw.length, raw.crc32, raw.fields)
    row.row, row.image_stamps = raw.row, raw.image_stamps
    rows: list[tuple[IndexRow, VLMSample | None]] = []
    try:
        raw.check()
        document = raw.member(JSON_FIELD)
        assert document is not None
        row.json_offset, row.json_length = document.data_offset, document.size
        payload = raw.payload(JSON_FIELD)
        texts = cook_texts(raw.key, raw.shard, payload, raw.fields, each_answer=each_answer)
        image_fields = texts[-1].image_fields  # no sample of the record shows more
        row.num_turns = len(texts[0].sample.messages)
        row.num_text_bytes = texts[0].num_text_bytes
        row.unknown_keys = (*texts[0].unknown_keys, *raw.unknown_keys)
        caps.check_images(texts[-1].sample.shown)
        images = raw.payloads(image_fields)
        row.images = tuple(
            image_facts(data, raw.called(name), caps)
            for name, data in zip(image_fields, images, strict=True)
        )
        row.image_digests = tuple(map(image_digest, images))
        row.opening = opening_digest(texts[0].sample, row.image_digests)
        row.pair = bool(texts[0].sample.answers)
        row.rollout = texts[0].sample.rollout
        rows = [(_row_of(row, text, n), text.sample) for n, text in enumerate(texts)]
    except DataError as error:
        row.error_class, row.reason = error.error_class, error.reason
        row.rollout = raw.drawn()
        rows = [(row, None)]
    if note is not None:
        for each, sample in rows:
            note(each, sample)
    return tuple(each for each, _ in rows)


def _row_of(record: IndexRow, text: CookedText, number: int) -> IndexRow:
    """The row of one of a record's samples; the record's own where it is the only one."""
    if text.sample.key == record.key:
        return record
    shown = len(text.image_fields)
    return replace(
        record,
        key=text.sample.key,
        branch=number,
        images=record.images[:shown],
        image_digests=record.image_digests[:shown],
        num_turns=len(text.sample.messages),
        num_text_bytes=text.num_text_bytes,
        unknown_keys=() if number else record.unknown_keys,  # of the record, so counted once
    )


def unknown_keys_of(rows: Sequence[IndexRow]) -> dict[str, int]:
    """Keys of the records that are not read -> records."""
    return count_keys([Counter(key for row in rows for key in row.unknown_keys)])


def flag_repeated_keys(rows: Sequence[IndexRow]) -> None:
    """Marks every sample whose key is not unique in the shard: none of them can be trusted."""
    places: defaultdict[str, list[IndexRow]] = defaultdict(list)
    for row in rows:
        places[row.key].append(row)
    for same in places.values():
        if len(same) == 1:
            continue
        fields = [name for row in same for name in row.fields]
        offsets = ", ".join(str(row.offset) for row in same[:6])
        if len(fields) == len(set(fields)):
            reason = f"the sample's members are not adjacent: parts of it lie at bytes {offsets}"
        else:
            reason = f"the key occurs {len(same)} times in the shard, at bytes {offsets}"
        for row in same:
            row.error_class, row.reason = "integrity", reason


class ContentDigest(ExitStack):
    """Says which samples a shard holds, in order, whatever its path or time stamp. Keys come before
    all lengths, and these before all checksums, which wait in files where they are many."""

    def __init__(self) -> None:
        super().__init__()
        self._digest = hashlib.blake2b(digest_size=16)
        both = (SpooledTemporaryFile(WAITING_BYTES) for _ in range(2))  # noqa: SIM115
        self._waiting = [self.enter_context(file) for file in both]

    def add(self, table: Any) -> None:
        """The next rows."""
        sinks: list[Callable[[bytes], Any]] = [file.write for file in self._waiting]
        for name, sink in zip(
            ("key", "length", "crc32"), [self._digest.update, *sinks], strict=True
        ):
            for chunk in table.column(name).chunks:
                sink("".join(f"{value}\n" for value in chunk.to_pylist()).encode())

    def hexdigest(self) -> str:
        """The digest, once all rows are there."""
        for file in self._waiting:
            file.seek(0)
            for block in iter(partial(file.read, WAITING_BYTES), b""):
                self._digest.update(block)
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The index of one shard.

    Args:
        rows: of INDEX_SCHEMA.
        content: digest of keys, lengths and checksums.
        unknown_keys: keys of its records that are not read -> records.
    """

    stamp: ShardStamp
    rows: PartRows
    content: str
    unknown_keys: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Rows, bad ones included."""
        return self.rows.num_rows

    @property
    def table(self) -> Any:
        """All rows as a pyarrow table, read again each time where they are many."""
        return self.rows.table()


def open_index(
    shards: Sequence[str | ShardStamp], builder: IndexBuilder, settings: BuildSettings
) -> list[ShardIndex]:
    """The index of every shard in order, made where it is missing or outdated.

    Raises:
        DataError: the first shard in order that is damaged or out of reach.
    """
    stamps = [builder.fetcher.head(shard) if isinstance(shard, str) else shard for shard in shards]
    rule = builder.rule
    parts = [part_for(settings.directory, stamp, rule) for stamp in stamps]
    each = open_parts(parts, builder, settings, lambda _, rows: _is_index(rows), what="index")
    return [_shard_index(part, rows) for part, rows in zip(parts, each, strict=True)]


def load_index(part: Part, builder: IndexBuilder) -> ShardIndex:
    """One shard's index from its part, which is made again where it is damaged."""
    return _shard_index(part, load_part(part, builder, _is_index))


def _is_index(rows: PartRows) -> bool:
    return {_CONTENT, _UNKNOWN_KEYS} <= rows.facts.keys()


def _shard_index(part: Part, rows: PartRows) -> ShardIndex:
    unknown = json.loads(rows.facts[_UNKNOWN_KEYS])
    return ShardIndex(part.stamp, rows, rows.facts[_CONTENT].decode(), unknown)


def to_table(rows: Sequence[IndexRow]) -> Any:
    """Rows as a pyarrow table."""
    schema = INDEX_SCHEMA
    if any(row.row is not None for row in rows):
        schema = pa.schema([*INDEX_SCHEMA, *RECORD_COLUMNS])
    columns: dict[str, list[Any]] = {
        name: [getattr(row, name) for row in rows] for name in schema.names
    }
    columns["images"] = [[asdict(image) for image in row.images] for row in rows]
    if "image_stamps" in columns:
        names = ("path", "size", "version")
        stamps = ([{n: getattr(s, n) for n in names} for s in row.image_stamps] for row in rows)
        columns["image_stamps"] = [of_row or None for of_row in stamps]
    return pa.table(columns, schema=schema)
