"""Exact lengths in tokens, before any pixel is decoded.

An index row gives the JSON member's bytes, and these the messages. The encoder's length rule takes
them with the image sizes, and each shard and encoder gets a parquet part. A sample that the
template cannot render becomes a row with a reason. A probe encodes a few samples and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlmpack.activity import ACTIVITY
from vlmpack.data.files.samples import RecordFiles, place_of_key
from vlmpack.data.files.shard_samples import shard_documents
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
from vlmpack.data.index.rollouts import ROLLOUT_COLUMNS, rollout_row
from vlmpack.data.index.shard_index import (
    IndexBuilder,
    IndexRow,
    Piece,
    ShardIndex,
    open_index,
    to_table,
    unknown_keys_of,
)
from vlmpack.data.protocols import ImageSize
from vlmpack.data.shards.samples import RawSample, cook_text
from vlmpack.data.shards.turns import record_key
from vlmpack.encode import Encoder
from vlmpack.encode.decode import oriented_size
from vlmpack.encode.rollouts import Rollout
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError, integrity_error, or_raise
from vlmpack.model_folder.load import made_with
from vlmpack.storage.fetch import ShardStamp

LENGTHS_RULE = "lengths-2"
"""Changes whenever this file's own part of the rule does; the encoder brings its fingerprint."""

TEXTS_AT_ONCE = 256
"""JSON members that are asked for together."""

COUNTS = ("num_tokens", "num_image_tokens", "num_label_tokens", "num_patches")
"""What a SampleLength says."""

LENGTHS_SCHEMA = pa.schema(
    [
        *((name, pa.int32()) for name in COUNTS),
        ("error_class", pa.string()),
        ("reason", pa.string()),
    ]
)
"""Columns of a part, row by row as in the index. Zeros and a reason for a bad sample."""

PREFIXES = pa.list_(pa.struct([("length", pa.int32()), ("digest", pa.int64())]))
"""Column `prefixes` of a part of samples that may share prefixes, the shorter one first."""

OBJECTS = b"objects"
"""Fact of a part whose samples have objects: `Encoder.objects_said`."""

CHOSEN = "num_chosen_tokens"
"""One more column of a part of pairs: tokens of the first of their two sequences."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """The part of one sample that the length rule needs. Image sizes are (width, height) in token
    order, after rotation."""

    sample: VLMSample
    sizes: tuple[ImageSize, ...]
    digests: tuple[int, ...]


def read_text(index: IndexBuilder, stamp: ShardStamp, row: dict[str, Any]) -> SampleText:
    """The text of one index row, from its JSON member alone.

    Raises:
        DataError: class `transport`, `integrity` or `schema`.
    """
    [document] = read_documents(index, stamp, [row])
    return text_of(index, stamp, row, or_raise(document))


def read_documents(
    index: IndexBuilder, stamp: ShardStamp, rows: Sequence[dict[str, Any]]
) -> Iterator[bytes | DataError]:
    """The JSON members of some rows of a shard's index, TEXTS_AT_ONCE read together.

    Raises:
        DataError: class `transport` or `integrity`, where a shard cannot be read.
    """
    files = RecordFiles(index.fetcher, index.caps)
    for start in range(0, len(rows), TEXTS_AT_ONCE):
        yield from _documents(files, stamp, rows[start : start + TEXTS_AT_ONCE])


def _documents(
    files: RecordFiles, stamp: ShardStamp, rows: Sequence[dict[str, Any]]
) -> list[bytes | DataError]:
    if stamp.holds_records:
        places = [
            place_of_key(record_key(r["key"], r["branch"]), r["offset"], r["length"], r["row"])
            for r in rows
        ]
        return files.documents(stamp, places, [row["fields"] for row in rows])
    if stamp.form:
        spans = [(row["offset"], row["length"], row["crc32"]) for row in rows]
        return shard_documents(files.fetcher, stamp, spans, files.caps)
    wanted = [(row["json_offset"], row["json_length"]) for row in rows]
    ranges = list(dict.fromkeys(wanted))  # the branches of a record have one
    documents = dict(zip(ranges, files.fetcher.read_ranges(stamp, ranges), strict=True))
    return [documents[span] for span in wanted]


def text_of(
    index: IndexBuilder, stamp: ShardStamp, row: dict[str, Any], document: bytes
) -> SampleText:
    """The text of one index row from its JSON member.

    Raises:
        DataError: class `schema`.
    """
    branch = row["branch"]
    key = record_key(row["key"], branch)
    fields, each = row["fields"], index.each_answer
    text = cook_text(key, stamp.path, document, fields, branch, each_answer=each)
    sizes = tuple(
        oriented_size(image["width"], image["height"], image["orientation"])
        for image in row["images"]
    )
    return SampleText(text.sample, sizes, tuple(row["image_digests"]))


def prefixes_of_text(
    encoder: Encoder, text: SampleText, sizes: Sequence[ImageSize]
) -> list[tuple[int, int]]:
    """(length, digest) of each place where a sample may branch; empty where prefixes are not
    shared.

    Raises:
        DataError: as Encoder.length.
    """
    if not encoder.settings.share_prefix:
        return []
    digests = [digest.to_bytes(8, "little", signed=True) for digest in text.digests]
    prefixes = encoder.prefixes(text.sample, sizes, digests, text.sizes)
    return [(one.length, int.from_bytes(one.digest, "little", signed=True)) for one in prefixes]


@dataclass(frozen=True, slots=True)
class LengthsBuilder:
    """Makes the lengths part of one shard; picklable."""

    index: IndexBuilder
    index_dir: Path
    encoder: Encoder

    @property
    def rule(self) -> str:
        """The rule's name, with what changes its result."""
        prefixes = "-prefixes" if self.encoder.settings.share_prefix else ""
        of_model = f"{self.encoder.fingerprint}-{made_with()}"
        return f"{LENGTHS_RULE}-{self.index.rule}-{of_model}{prefixes}"

    def part(self, stamp: ShardStamp) -> Part:
        """The lengths part of a shard, which may not exist yet."""
        return part_for(self.index_dir, stamp, self.rule)

    def __call__(self, part: Part) -> None:
        """Computes and writes the lengths of one shard.

        Raises:
            DataError: class `transport` or `integrity`, where the shard cannot be read.
        """
        stamp = replace(self.index.fetcher.head(part.stamp.path), form=part.stamp.form)
        [shard] = open_index([stamp], self.index, BuildSettings(directory=self.index_dir))
        if shard.stamp != part.stamp:
            raise integrity_error("the shard changed after it was indexed", shard=part.stamp.path)
        with part_writer(part.path) as writer:
            for table in self.index.each(partial(self.table_of, shard.stamp), shard.rows.groups()):
                writer.add(table)

    def table_of(self, stamp: ShardStamp, index: Any) -> Any:
        """The lengths of some rows of a shard's index.

        Raises:
            DataError: as above.
        """
        return self.as_table(self._rows(stamp, index.to_pylist()))

    def as_table(self, rows: Sequence[dict[str, Any]]) -> Any:
        """Rows as a pyarrow table."""
        columns = LENGTHS_SCHEMA
        if self.encoder.settings.pairs:
            columns = columns.append(pa.field(CHOSEN, pa.int32()))
        if self.encoder.settings.share_prefix:
            columns = columns.append(pa.field("prefixes", PREFIXES))
        if self.encoder.settings.rollouts:
            fields = [pa.field(name, pa.int64()) for name in ROLLOUT_COLUMNS]
            columns = pa.schema([*columns, *fields])
            rows = [row | self._rollout(row["rollout"]) for row in rows]
        facts = {}
        if any(row["has_objects"] for row in rows):
            facts[OBJECTS] = self.encoder.objects_said.encode()
        return pa.Table.from_pylist(list(rows), schema=columns).replace_schema_metadata(facts)

    def _rollout(self, rollout: Rollout | None) -> dict[str, int]:
        if rollout is None or not rollout.token_ids:
            return rollout_row(rollout)
        otherwise = self.encoder.drawn_tokens.is_written_otherwise(rollout)
        return rollout_row(rollout, otherwise=otherwise)

    def _rows(self, stamp: ShardStamp, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        lengths: list[dict[str, Any]] = []
        drawn: dict[Any, Rollout | None] = {}
        if self.encoder.settings.rollouts and any(row["reason"] for row in rows):
            # The index keeps no text of bad samples, and their rewards count.
            drawn = {(each.key, each.offset): each.rollout for each in self.index.scan(stamp)}
        documents = read_documents(self.index, stamp, [r for r in rows if r["reason"] is None])
        for row in rows:
            if row["reason"] is not None:
                bad = _bad_row(row["error_class"], row["reason"])
                lengths.append(bad | {"rollout": drawn.get((row["key"], row["offset"]))})
            else:
                lengths.append(self._row(stamp, row, next(documents)))
        return lengths

    def _row(
        self, stamp: ShardStamp, row: dict[str, Any], document: bytes | DataError
    ) -> dict[str, Any]:
        ACTIVITY.moved()
        try:
            text = text_of(self.index, stamp, row, or_raise(document))
        except DataError as error:
            return _bad_row(error.error_class, error.reason)
        return self.measure(text)

    def measure(self, text: SampleText) -> dict[str, Any]:
        """One row: the sample's length, or why it has none."""
        rollout = text.sample.rollout
        said = {"has_objects": text.sample.objects is not None, "rollout": rollout}
        try:
            length = self.encoder.length(text.sample, text.sizes)
            prefixes = prefixes_of_text(self.encoder, text, text.sizes)
        except DataError as error:
            return _bad_row(error.error_class, error.reason) | said
        counts = {name: getattr(length, name) for name in (*COUNTS, CHOSEN)}
        listed = [{"length": length, "digest": digest} for length, digest in prefixes]
        row = {"prefixes": listed, "error_class": None, "reason": None}
        return counts | row | said


@dataclass(frozen=True, slots=True)
class ShardBuilder(IndexBuilder):
    """Makes the index part of one shard and, in the same pass, its lengths part; picklable."""

    lengths: LengthsBuilder = field(kw_only=True)

    @classmethod
    def of(cls, lengths: LengthsBuilder) -> ShardBuilder:
        """The one that reads shards as the lengths' own index does."""
        index = lengths.index
        return cls(index.fetcher, index.caps, index.each_answer, index.processes, lengths=lengths)

    def piece(self, stamp: ShardStamp, samples: Iterable[RawSample]) -> Piece:
        """See IndexBuilder; with lengths."""
        measured: list[dict[str, Any] | None] = []

        def note(row: IndexRow, sample: VLMSample | None) -> None:
            sizes = tuple(image.size for image in row.images)
            measured.append(
                None
                if sample is None
                else self.lengths.measure(SampleText(sample, sizes, row.image_digests))
            )

        rows = self.rows(samples, note)
        lengths = [
            length
            if row.reason is None and length is not None
            else _bad_row(str(row.error_class), str(row.reason)) | {"rollout": row.rollout}
            for row, length in zip(rows, measured, strict=True)
        ]
        return to_table(rows), unknown_keys_of(rows), self.lengths.as_table(lengths)

    def lengths_writer(self, stamp: ShardStamp) -> AbstractContextManager[PartWriter | None]:
        """See IndexBuilder."""
        return part_writer(self.lengths.part(stamp).path)


def open_lengths(
    indexes: Sequence[ShardIndex], builder: LengthsBuilder, settings: BuildSettings
) -> list[PartRows]:
    """The lengths of every shard, in the order of the indexes.

    Raises:
        DataError: the first shard in order that cannot be read.
    """
    rule = builder.rule
    parts = [part_for(builder.index_dir, index.stamp, rule) for index in indexes]
    return open_parts(
        parts,
        builder,
        settings,
        lambda place, rows: _is_of(indexes[place], rows, builder),
        what="lengths",
    )


def load_lengths(part: Part, index: ShardIndex, builder: LengthsBuilder) -> PartRows:
    """One shard's lengths from their part, which is made again where it is damaged."""
    return load_part(part, builder, lambda rows: _is_of(index, rows, builder))


def measured(index: ShardIndex, builder: IndexBuilder) -> PartRows:
    """What says which samples of a shard can be used: its lengths, or its index where no encoder
    measures them."""
    if not isinstance(builder, ShardBuilder):
        return index.rows
    return load_lengths(builder.lengths.part(index.stamp), index, builder.lengths)


def _is_of(index: ShardIndex, rows: PartRows, builder: LengthsBuilder) -> bool:
    said = objects_said(rows)
    fits = not said or said == builder.encoder.objects_said
    return fits and rows.group_sizes == index.rows.group_sizes


def objects_said(rows: PartRows) -> str:
    """How the objects were written that lengths are of; empty where no sample has some."""
    return rows.facts.get(OBJECTS, b"").decode()


def _bad_row(error_class: str, reason: str) -> dict[str, Any]:
    zeros: dict[str, Any] = dict.fromkeys((*COUNTS, CHOSEN), 0)
    row = {"prefixes": [], "error_class": error_class, "reason": reason, "has_objects": False}
    row["rollout"] = None
    return zeros | row
