"""The strict checks over whole shards, down to the pixels; `vlmpack data lint`.

Shards are read again, whatever an index says. If there is an index, the samples' checksums are
compared with it, since training skips what differs. Each shard's tar structure is checked. So are
each sample's names and keys, conversation, image headers and decoded images. An encoder adds the
chat template and the length rule. A recipe adds the longest length that it allows. A bad sample is
one finding. So is a damaged shard, since nobody can say what lies behind the damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlmpack.data.index.groups import shared_images
from vlmpack.data.index.parts import part_for, read_part
from vlmpack.data.index.shard_index import (
    IndexBuilder,
    IndexRow,
    flag_repeated_keys,
    index_rows,
    unknown_keys_of,
)
from vlmpack.data.index.shard_pool import each_shard
from vlmpack.data.index.table import SampleLimits
from vlmpack.data.shards.naming import SampleCaps, count_keys
from vlmpack.data.shards.samples import REINDEX, RawSample, changed_since_indexed, cook
from vlmpack.encode import Encoder, decode_image
from vlmpack.encode.coordinates import Doubts, note_doubt
from vlmpack.encode.decode import oriented_size, which_image
from vlmpack.encode.sample import refuse_other_form
from vlmpack.errors import DataError, integrity_error, schema_error
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.storage.sources import FoundShard
from vlmpack.words import shape_of

PRELOAD = ("vlmpack.data.tools.lint",)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a sample, or of the shard itself where there is no key; `offset` is its first
    byte if known."""

    shard: str
    key: str | None
    offset: int | None
    error_class: str
    reason: str

    @property
    def place(self) -> str:
        """Where it is."""
        key = "" if self.key is None else f", key {self.key}"
        return f"{self.shard}{key}" + ("" if self.offset is None else f", byte {self.offset}")


@dataclass(frozen=True, slots=True)
class LintReport:
    """One shard.

    Args:
        samples: bad ones included.
        findings: in the shard's order.
        unknown_keys: keys of the records that are not read -> records.
        pairs: samples without a fault that are pairs of answers.
        without_image: samples without a fault that show no image.
        digests: (records,) pyarrow lists: of the images of each record without a fault.
        too_long: samples above the limits, faults or not.
        doubts: samples without a fault whose coordinates may be wrong, with an encoder.
    """

    shard: str
    samples: int
    images: int
    num_bytes: int
    findings: tuple[Finding, ...]
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    pairs: int = 0
    without_image: int = 0
    digests: Any = field(default=None, compare=False)
    too_long: int = 0
    doubts: Doubts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LintOne:
    """Checks one shard; picklable.

    Args:
        index_dir: where index parts lie that shards are compared with; none is made.
        pair_encoder: of records that are pairs; None where they are refused.
        paired: paths of shards where every record must be a pair.
        rollout_encoder: of records that have the tokens of a rollout; None where they are read as
            conversations.
        drawn: paths of shards where every record must be one.
        refuse_pairs: whether a pair is a fault, with or without an encoder.
        limits: path of a shard -> what one sample of it may have, with an encoder; none where no
            run would look.
        refuse_long: whether a sample above them is a fault.
    """

    fetcher: Fetcher
    caps: SampleCaps
    encoder: Encoder | None = None
    refuse_unknown_keys: bool = False
    index_dir: Path | None = None
    pair_encoder: Encoder | None = None
    paired: frozenset[str] = frozenset()
    rollout_encoder: Encoder | None = None
    drawn: frozenset[str] = frozenset()
    refuse_pairs: bool = False
    limits: Mapping[str, SampleLimits] = field(default_factory=dict)
    refuse_long: bool = False

    def __call__(self, shard: FoundShard) -> LintReport:
        """All findings of one shard."""
        path = shard.path
        rows: list[IndexRow] = []
        images, size, pairs, too_long = 0, 0, 0, 0
        doubts: Doubts = {}
        fault: DataError | None = None
        try:
            stamp = shard.seen(self.fetcher)
            size = stamp.size
            for raw in self._index.samples(stamp):
                cooked = index_rows(raw, self.caps, each_answer=self._index.each_answer)
                seen = 0  # images of a record are decoded once
                for row in cooked:
                    if not row.reason:
                        decoded, is_pair, is_long = self._check_content(raw, row, seen, doubts)
                        images += decoded
                        pairs += is_pair
                        too_long += is_long
                    seen = len(row.images)
                rows += cooked
            flag_repeated_keys(rows)
            self._compare_with_index(stamp, rows)
        except DataError as error:
            flag_repeated_keys(rows)
            fault = error
        findings = [
            Finding(path, row.key, row.offset, str(row.error_class), row.reason)
            for row in rows
            if row.reason is not None
        ]
        if fault is not None:
            findings.append(Finding(path, fault.key, fault.offset, fault.error_class, fault.reason))
        unknown = unknown_keys_of(rows)
        digests = _digests_of(rows)
        bare = sum(row.reason is None and not row.images for row in rows)
        return LintReport(
            path,
            len(rows),
            images,
            size,
            tuple(findings),
            unknown,
            pairs,
            bare,
            digests,
            too_long,
            doubts,
        )

    @property
    def _index(self) -> IndexBuilder:
        each_answer = self.encoder is not None and self.encoder.each_answer
        return IndexBuilder(self.fetcher, self.caps, each_answer)

    def _compare_with_index(self, stamp: ShardStamp, rows: Sequence[IndexRow]) -> None:
        """Note in the rows what training would refuse: bytes that differ from the index. A shard of
        the same size and time stamp is the same one to the index.

        Raises:
            DataError: (integrity) the index has other samples.
        """
        if self.index_dir is None:
            return
        part = part_for(self.index_dir, stamp, self._index.rule)
        table = read_part(part.path)
        if table is None:
            return
        names = ("key", "offset", "length")
        indexed = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
        if indexed != [(row.key, row.offset, row.length) for row in rows]:
            raise integrity_error(
                f"the shard's {len(rows)} samples are not the {len(indexed)} of its index part "
                f"({part.path}): the shard changed and kept its size and time stamp; {REINDEX}"
            )
        for row, checksum in zip(rows, table.column("crc32").to_pylist(), strict=True):
            if row.reason is None and row.crc32 != checksum:
                fault = changed_since_indexed(row.crc32, checksum)
                row.error_class, row.reason = fault.error_class, fault.reason

    def _check_content(
        self, raw: RawSample, row: IndexRow, seen: int, doubts: Doubts
    ) -> tuple[int, bool, bool]:
        """Decode every image behind the first `seen`, and encode; notes a fault in the row. Returns
        the images decoded, whether the sample is a good pair, and whether it is too long."""
        count, is_pair, is_long = 0, False, False
        try:
            sample = cook(raw, row.branch, each_answer=self._index.each_answer)
            for index, data in enumerate(sample.images[seen:], start=seen):
                decode_image(
                    data,
                    which_image(index, sample.image_names),
                    max_pixels=self.caps.max_image_pixels,
                )
                count += 1
            if raw.shard in self.paired or self.refuse_pairs:
                refuse_other_form(sample, pairs=raw.shard in self.paired)
            encoder = self.encoder
            if self.pair_encoder is not None and (sample.answers or raw.shard in self.paired):
                encoder = self.pair_encoder
            is_drawn = sample.rollout is not None and bool(sample.rollout.token_ids)
            if self.rollout_encoder is not None and (is_drawn or raw.shard in self.drawn):
                encoder = self.rollout_encoder
            if encoder is not None:
                sizes = [oriented_size(i.width, i.height, i.orientation) for i in row.images]
                length = encoder.length(sample, sizes)
                tokens, patches = length.num_tokens, length.num_patches
                num_tokens = encoder.encode(sample).length
                if num_tokens != tokens:
                    raise integrity_error(
                        f"encoded to {num_tokens} tokens, the length rule says {tokens}"
                    )
                limits = self.limits.get(raw.shard)
                is_long = limits is not None and not limits.fit(tokens, patches)
                if limits is not None and is_long and self.refuse_long:
                    raise DataError(
                        f"{limits.excess(tokens, patches)} (data.over_long: error stops the run)",
                        error_class="too_long",
                    )
            if self.refuse_unknown_keys and row.unknown_keys:
                raise schema_error(
                    f"the record has keys that are not read: {', '.join(row.unknown_keys)} "
                    "(data.unknown_keys: refuse)"
                )
            is_pair = bool(sample.answers)
            if encoder is not None:
                note_doubt(doubts, encoder.doubt(sample), f"{raw.shard}, {row.key}")
        except DataError as error:
            row.error_class, row.reason = error.error_class, error.reason
        return count, is_pair, is_long


def _digests_of(rows: Sequence[IndexRow]) -> Any:
    """The images' digests of each record without a fault; a record of several samples counts
    once."""
    good = [row for row in rows if row.reason is None]
    records = {(row.offset, row.row): row.image_digests for row in good}  # tables: by row
    return pa.array(list(records.values()), type=pa.list_(pa.int64()))


def lint_shards(
    shards: Sequence[FoundShard], work: LintOne, *, processes: int, preload: tuple[str, ...] = ()
) -> Iterator[LintReport]:
    """A report of every shard, in the order given.

    Args:
        shards: those with a version are not asked for it again.
        preload: modules that an encoder imports late, for the processes to begin with.
    """
    yield from each_shard(
        work,
        shards,
        processes=processes,
        preload=(*PRELOAD, *preload),
        in_order=True,
        remedy="run `vlmpack data lint` with fewer --processes",
    )


def lint_lines(reports: Sequence[LintReport]) -> list[str]:
    """One line per reason, apart from numbers and names: its count and first place, commonest
    first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for report in reports:
        for finding in report.findings:
            alike = (finding.error_class, shape_of(finding.reason))
            groups.setdefault(alike, []).append(finding)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [
        f"{len(each):,} {each[0].error_class}: {each[0].reason} "
        f"({'first: ' if len(each) > 1 else ''}{each[0].place})"
        for each in ordered
    ]


def lint_summary(reports: Sequence[LintReport]) -> dict[str, Any]:
    """Figures over all shards, and the findings."""
    findings = [finding for report in reports for finding in report.findings]
    digests = [report.digests for report in reports if report.digests is not None]
    doubts: Doubts = {}
    for report in reports:
        for kind, (count, first) in report.doubts.items():
            before, example = doubts.get(kind, (0, first))
            doubts[kind] = before + count, example
    some, all_of_them = shared_images(pa.concat_arrays(digests)) if digests else (0, 0)
    return {
        "shards": len(reports),
        "samples": sum(report.samples for report in reports),
        "pairs": sum(report.pairs for report in reports),
        "too_long": sum(report.too_long for report in reports),
        "images": sum(report.images for report in reports),
        "samples_without_image": sum(report.without_image for report in reports),
        "records_sharing_an_image": some,
        "records_sharing_all_images": all_of_them,
        "bytes": sum(report.num_bytes for report in reports),
        "unknown_keys": count_keys(report.unknown_keys for report in reports),
        "coordinates": doubts,
        "by_class": dict(sorted(Counter(item.error_class for item in findings).items())),
        "findings": [asdict(finding) for finding in findings],
    }
