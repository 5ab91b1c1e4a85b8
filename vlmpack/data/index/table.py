"""All samples of one split in memory: index and lengths joined, one number per sample.

Numbers run through the sources, their shards and the shards' samples in order. Columns are numpy
arrays (about 60 bytes a sample, and the keys). A worker gets a SampleRef for each sample, so
workers hold no index.

Samples longer than the sequence length are refused, dropped, or get smaller images. Planning
decides it from lengths alone, and no sample is ever cut. `shrink_images` scales all images of a
sample by the largest factor of 1/256 .. 255/256 with which it fits. The encoder gets the target
sizes. A sample that is too long even at the smallest factor is dropped, counted and listed, as
under `drop`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlmpack.data.index.groups import SamplePrefixes, group_numbers, joined_digests
from vlmpack.data.index.lengths import CHOSEN, COUNTS, SampleText, objects_said, prefixes_of_text
from vlmpack.data.index.shard_index import ShardIndex
from vlmpack.data.protocols import ImageSize
from vlmpack.data.shards.naming import count_keys
from vlmpack.encode import Encoder, SampleLength
from vlmpack.errors import DataError
from vlmpack.storage.fetch import ShardStamp

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PackPlace:
    """Where a sample lies in saved packs: a span of a file, its checksum, and the sample's place in
    the pack."""

    stamp: ShardStamp
    offset: int
    length: int
    crc32: int
    place: int


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One sample of a plan: where it lies, and what it must turn out to be.

    Args:
        number: its place in the split.
        offset, length, crc32: of its span in the shard.
        num_tokens: its planned length, which its encoding must have.
        sizes: target (width, height) per image where the plan shrank them, else None.
        branch: which of its record's samples it is; None where the record is one sample.
        error_class: set with `reason` where the sample is known to be bad and becomes a hole.
        pack: where its tokens are saved, if they are.
        row: of its record in that span, where the span holds several.
        images: where its images lie in a store, if they are files there.
    """

    number: int
    key: str
    stamp: ShardStamp
    offset: int
    length: int
    crc32: int
    num_tokens: int
    sizes: tuple[ImageSize, ...] | None = None
    branch: int | None = None
    error_class: str | None = None
    reason: str | None = None
    pack: PackPlace | None = None
    num_patches: int = 0
    row: int = 0
    images: tuple[ShardStamp, ...] = ()

    @property
    def shard(self) -> str:
        """The path of the shard that is indexed."""
        return self.stamp.path

    def located(self, error: DataError) -> DataError:
        """An error with the sample's place, where it had none."""
        return error.located(key=self.key, shard=self.shard, offset=self.offset)


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Columns over all N samples of a split.

    Args:
        shard_starts: (S + 1,) the number of each shard's first sample.
        source_starts: (D + 1,) the number of each source's first sample.
        offsets, lengths, crc32s: (N,) int64, the spans.
        num_tokens, num_image_tokens, num_label_tokens, num_patches: (N,) int64.
        bad: (N,) bool, samples with a reason.
        keys: pyarrow chunked array of N strings.
        faults: number -> (error class, reason) of the bad ones.
        shrunk: number -> target (width, height) of each image, where the plan shrank them.
        unknown_keys: keys of the records that are not read -> records.
        num_chosen_tokens: (N,) int64, of a pair's first sequence; None without pairs.
        images_digests: (N,) int64 of each sample's images, 0 for none; None where unused.
        branches: (N,) int64, which of their record's samples they are, in order; -1 where a record
            is one sample. None where all are.
        prefixes: where samples may branch; None where unused.
        rows: (N,) int64, of records in their spans; None where all are samples of shards.
        image_stamps: pyarrow chunked array of N lists, which say where images lie in a store. None
            as `rows`.
        objects: how objects were written; empty where no sample has some.
    """

    shards: tuple[ShardStamp, ...]
    shard_starts: Int64s
    source_starts: Int64s
    offsets: Int64s
    lengths: Int64s
    crc32s: Int64s
    num_tokens: Int64s
    num_image_tokens: Int64s
    num_label_tokens: Int64s
    num_patches: Int64s
    bad: Bools
    keys: Any
    faults: dict[int, tuple[str, str]]
    shrunk: dict[int, tuple[ImageSize, ...]]
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    num_chosen_tokens: Int64s | None = None
    images_digests: Int64s | None = None
    branches: Int64s | None = None
    prefixes: SamplePrefixes | None = None
    rows: Int64s | None = None
    image_stamps: Any = None
    objects: str = ""

    @property
    def num_samples(self) -> int:
        """N, bad samples included."""
        return int(self.offsets.shape[0])

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) tokens and (n,) vision patches of samples."""
        return self.num_tokens[numbers], self.num_patches[numbers]

    def sequence_tokens(self, numbers: Int64s) -> Int64s:
        """(n, k) tokens of each sequence of samples: 2 of a pair, else 1."""
        tokens = self.num_tokens[numbers]
        if self.num_chosen_tokens is None:
            return tokens[:, None]
        chosen = self.num_chosen_tokens[numbers]
        return np.stack([chosen, tokens - chosen], axis=1)

    def aligned_sizes(self, numbers: Int64s, alignment: int) -> tuple[Int64s, Int64s]:
        """As `sizes`, each sequence of a pair rounded up by itself, as a row lays it out."""
        tokens, patches = self.sizes(numbers)
        if self.num_chosen_tokens is not None:
            parts = self.sequence_tokens(numbers)
            tokens = (-(-parts // alignment) * alignment).sum(axis=1)
        return tokens, patches

    def groups(self, numbers: Int64s, *, by_image: bool) -> Int64s | None:
        """(n,) the group of each sample: branches of a record and, with `by_image`, samples with
        the same images. Groups are named after their first sample. None where all are alone."""
        records = numbers
        if self.branches is not None:
            records = numbers - np.maximum(self.branches[numbers], 0)
        elif not by_image:
            return None
        if not by_image:
            return records
        assert self.images_digests is not None
        return group_numbers(records, self.images_digests[numbers])

    def sources(self, numbers: Int64s) -> Int64s:
        """(n,) the place of each sample's source."""
        return np.searchsorted(self.source_starts, numbers, side="right") - 1

    def shard_of(self, number: int) -> int:
        """The place of a sample's shard in `shards`."""
        return int(np.searchsorted(self.shard_starts, number, side="right")) - 1

    def key(self, number: int) -> str:
        """A sample's key."""
        return str(self.keys[number].as_py())

    def ref(self, number: int) -> SampleRef:
        """The reference by which a worker reads one sample."""
        error_class, reason = self.faults.get(number, (None, None))
        branch = -1 if self.branches is None else int(self.branches[number])
        return SampleRef(
            number=number,
            key=self.key(number),
            stamp=self.shards[self.shard_of(number)],
            offset=int(self.offsets[number]),
            length=int(self.lengths[number]),
            crc32=int(self.crc32s[number]),
            num_tokens=int(self.num_tokens[number]),
            sizes=self.shrunk.get(number),
            branch=None if branch < 0 else branch,
            error_class=error_class,
            reason=reason,
            num_patches=int(self.num_patches[number]),
            row=0 if self.rows is None else int(self.rows[number]),
            images=self._images(number),
        )

    def _images(self, number: int) -> tuple[ShardStamp, ...]:
        """Where a sample's images lie in a store; empty where they do not."""
        if self.image_stamps is None:
            return ()
        return tuple(ShardStamp(**stamp) for stamp in self.image_stamps[number].as_py() or ())


def join_tables(sources: Sequence[tuple[Sequence[ShardIndex], Sequence[Any]]]) -> SampleTable:
    """One table from the (indexes, lengths) of each source."""
    indexes = [index for shard_indexes, _ in sources for index in shard_indexes]
    lengths = pa.concat_tables([table for _, tables in sources for table in tables])
    # Files that are no shards have columns more; a shard's samples have nothing there.
    rows = pa.concat_tables([index.table for index in indexes], promote_options="default")
    counts = [index.num_samples for index in indexes]
    shard_counts = [len(shard_indexes) for shard_indexes, _ in sources]
    shard_starts = starts_of(counts)
    reasons = lengths.column("reason").combine_chunks()
    bad = np.asarray(reasons.is_valid().to_numpy(zero_copy_only=False), dtype=np.bool_)
    classes = lengths.column("error_class")
    faults = {
        int(number): (str(classes[number].as_py()), str(reasons[number].as_py()))
        for number in np.flatnonzero(bad).tolist()
    }
    prefixes = None
    if "prefixes" in lengths.column_names:
        prefixes = SamplePrefixes.of(lengths.column("prefixes"))
    return SampleTable(
        shards=tuple(index.stamp for index in indexes),
        shard_starts=shard_starts,
        source_starts=shard_starts[starts_of(shard_counts)],
        offsets=int64s(rows, "offset"),
        lengths=int64s(rows, "length"),
        crc32s=int64s(rows, "crc32"),
        **{name: int64s(lengths, name) for name in COUNTS},
        bad=bad,
        keys=rows.column("key"),
        faults=faults,
        shrunk={},
        unknown_keys=count_keys(index.unknown_keys for index in indexes),
        num_chosen_tokens=int64s(lengths, CHOSEN) if CHOSEN in lengths.column_names else None,
        prefixes=prefixes,
        branches=_branches(rows.column("branch")),
        images_digests=joined_digests(rows.column("image_digests").combine_chunks()),
        objects=objects_said([table for _, tables in sources for table in tables]),
        **_of_records(rows),
    )


def _of_records(rows: Any) -> dict[str, Any]:
    """The columns of files that are no shards, where there are some."""
    if "row" not in rows.column_names:
        return {}
    stamps = rows.column("image_stamps")
    numbers = np.asarray(rows.column("row").fill_null(0).to_numpy(), dtype=np.int64)
    return {"rows": numbers, "image_stamps": stamps if stamps.null_count < len(stamps) else None}


def _branches(column: Any) -> Int64s | None:
    """(N,) the numbers of branches; None where no record has some."""
    if column.null_count == len(column):
        return None
    return np.asarray(column.fill_null(-1).to_numpy(), dtype=np.int64)


def starts_of(counts: Sequence[int]) -> Int64s:
    """(n + 1,) where each of n runs begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(np.asarray(counts, dtype=np.int64)))).astype(np.int64)


def int64s(table: Any, name: str) -> Int64s:
    """A column of a pyarrow table."""
    column = table.column(name).to_numpy()
    return np.ascontiguousarray(column, dtype=np.int64)


OverLong = Literal["error", "drop", "shrink_images"]

SCALE_STEPS = 256


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sample that the plan leaves out, by its number in the split; the reason has both
    lengths."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fitted:
    """The table after the policy.

    Args:
        eligible: (N,) bool, the samples that the plan may use (holes included).
    """

    table: SampleTable
    eligible: Bools
    dropped: tuple[Dropped, ...]

    @property
    def num_samples(self) -> int:
        """Samples of the split, used or dropped; those held back for another are not its."""
        return int(self.eligible.sum()) + len(self.dropped)

    def only(self, chosen: Bools) -> Fitted:
        """The split of some samples, (N,) bool; the others keep their numbers and are not used."""
        table, dropped = self.table, (one for one in self.dropped if chosen[one.number])
        faults = {number: fault for number, fault in table.faults.items() if chosen[number]}
        shrunk = {number: sizes for number, sizes in table.shrunk.items() if chosen[number]}
        table = replace(table, faults=faults, shrunk=shrunk)
        return Fitted(table, self.eligible & chosen, tuple(dropped))


def scaled_sizes(sizes: Sequence[ImageSize], step: int) -> tuple[ImageSize, ...]:
    """Every size times `step / SCALE_STEPS`, at least 1 pixel a side."""
    return tuple(
        (max(1, width * step // SCALE_STEPS), max(1, height * step // SCALE_STEPS))
        for width, height in sizes
    )


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """The most that one sample may have.

    Args:
        seq_length: tokens (training.seq_length).
        max_patches: vision patches (packing.max_vision_patches); None for no limit.
    """

    seq_length: int
    max_patches: int | None = None

    @property
    def in_words(self) -> tuple[str, str]:
        """Words for a sample above the limits."""
        return (
            f"longer than training.seq_length {self.seq_length}",
            f"more than packing.max_vision_patches {self.max_patches}",
        )

    def fit(self, num_tokens: npt.ArrayLike, num_patches: npt.ArrayLike) -> Bools:
        """(n,) bool of the samples that fit, by their (n,) tokens and patches. One bool for one
        sample."""
        fits: Bools = np.less_equal(num_tokens, self.seq_length)
        if self.max_patches is not None:
            fits = fits & np.less_equal(num_patches, self.max_patches)
        return fits

    def excess(self, tokens: int, patches: int) -> str:
        """The quantity of a sample that is above its limit, in words."""
        if tokens <= self.seq_length:
            return f"{patches} vision patches; packing.max_vision_patches is {self.max_patches}"
        return f"{tokens} tokens; training.seq_length is {self.seq_length}"


def shrink_to_fit(
    text: SampleText, encoder: Encoder, limits: SampleLimits
) -> tuple[tuple[ImageSize, ...], SampleLength] | None:
    """The largest scaled sizes with which the sample fits, and its length then; None if none do.

    Bisection over the 255 factors: image tokens grow with the size. The result is checked by its
    own length, so a rule that is not monotone costs size, never correctness. Numbers of objects may
    take more digits in a smaller image. So with objects larger factors are tried, until two in a
    row fail.
    """
    best: tuple[tuple[ImageSize, ...], SampleLength] | None = None
    low, high = 1, SCALE_STEPS - 1
    while text.sizes and low <= high:
        step = (low + high) // 2
        found = _scaled(text, encoder, limits, step)
        if found is None:  # images too small, or too narrow, for the family
            low = step + 1
        elif found[2]:
            best, low = found[:2], step + 1
        else:
            high = step - 1
    failed = 0 if text.sample.objects is not None and best is not None else 2
    while failed < 2 and low < SCALE_STEPS:
        found = _scaled(text, encoder, limits, low)
        best, failed = (found[:2], 0) if found and found[2] else (best, failed + 1)
        low += 1
    return best


def _scaled(
    text: SampleText, encoder: Encoder, limits: SampleLimits, step: int
) -> tuple[tuple[ImageSize, ...], SampleLength, Bools] | None:
    """Sizes, length, and whether the sample fits then; None where the family refuses them."""
    sizes = scaled_sizes(text.sizes, step)
    try:
        length = encoder.length(text.sample, sizes, text.sizes)
    except DataError:
        return None
    return sizes, length, limits.fit(length.num_tokens, length.num_patches)


def apply_over_long(
    table: SampleTable,
    *,
    policy: OverLong,
    limits: SampleLimits,
    encoder: Encoder,
    read_text: Callable[[int], SampleText],
) -> Fitted:
    """Which samples the plan may use, and at what image sizes.

    Raises:
        DataError: class `too_long` under `error`, with the count and the longest few.
    """
    over = np.flatnonzero(~limits.fit(table.num_tokens, table.num_patches))
    eligible = np.ones(table.num_samples, dtype=np.bool_)
    if over.size == 0:
        return Fitted(table, eligible, ())
    if policy == "error":
        raise _too_long(table, over.tolist(), limits)
    names = COUNTS if table.num_chosen_tokens is None else (*COUNTS, CHOSEN)
    columns = {name: getattr(table, name).copy() for name in names}
    shrunk: dict[int, tuple[ImageSize, ...]] = {}
    dropped: list[Dropped] = []
    prefixes: dict[int, Sequence[tuple[int, int]]] = {}
    for number in over.tolist():
        fitting = None
        if policy == "shrink_images":
            text = read_text(number)
            fitting = shrink_to_fit(text, encoder, limits)
        if fitting is None:
            eligible[number] = False
            dropped.append(Dropped(number, _drop_reason(table, number, policy, limits)))
            continue
        shrunk[number] = fitting[0]
        prefixes[number] = prefixes_of_text(encoder, text, fitting[0])
        for name, column in columns.items():
            column[number] = getattr(fitting[1], name)
    prefixes_left = None if table.prefixes is None else table.prefixes.replaced(prefixes)
    fitted = replace(table, shrunk=shrunk, prefixes=prefixes_left, **columns)
    return Fitted(fitted, eligible, tuple(dropped))


def _drop_reason(table: SampleTable, number: int, policy: OverLong, limits: SampleLimits) -> str:
    tokens, patches = int(table.num_tokens[number]), int(table.num_patches[number])
    reason = limits.excess(tokens, patches)
    if tokens <= limits.seq_length:
        return reason + (", and no smaller size of its images fits" if policy != "drop" else "")
    if policy == "shrink_images":
        images = int(table.num_image_tokens[number])
        reason += f", and the {tokens - images} tokens of text leave too little room for images"
    return reason


def _too_long(table: SampleTable, over: Sequence[int], limits: SampleLimits) -> DataError:
    longer = [number for number in over if table.num_tokens[number] > limits.seq_length]
    column, knob = table.num_tokens, "training.seq_length"
    one = len(longer or over) == 1
    above = f"{'is' if one else 'are'} longer than {knob} {limits.seq_length} tokens"
    most = "longest"
    kind = "samples"
    if table.num_chosen_tokens is not None:
        kind, above = "pairs", f"{above} (both sequences of a pair together)"
    if not longer:
        column, knob = table.num_patches, "packing.max_vision_patches"
        above = f"{'has' if one else 'have'} more vision patches than {knob} {limits.max_patches}"
        most = "largest"
    worst = sorted(longer or over, key=lambda number: (-int(column[number]), number))
    shown = ", ".join(f"{table.key(number)!r} {column[number]}" for number in worst[:5])
    text = (table.num_tokens - table.num_image_tokens)[worst]
    others = "drop" if (text > limits.seq_length).all() else "drop or shrink_images"
    return DataError(
        f"{len(worst)} of {table.num_samples} {kind} {above}; the {most}: {shown}. Raise "
        f"{knob}, or set data.over_long to {others}",
        error_class="too_long",
        key=table.key(worst[0]) if len(worst) == 1 else None,
        shard=table.shards[table.shard_of(worst[0])].path if len(worst) == 1 else None,
    )
