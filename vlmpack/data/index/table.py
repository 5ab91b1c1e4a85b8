"""All samples of one split: index and lengths joined, one number per sample.

Numbers run through the sources, their shards and the shards' samples in order. The columns lie in a
file that all processes of a node read (`table_file`). Below LARGE samples a process keeps the
numbers in memory, about 60 bytes a sample. A worker gets a SampleRef for each sample, so workers
hold no table.

Samples longer than the sequence length are refused, dropped, or get smaller images. Planning
decides it from lengths alone, and no sample is ever cut. `shrink_images` scales all images of a
sample by the largest factor of 1/256 .. 255/256 with which it fits. The encoder gets the target
sizes. A sample that is too long even at the smallest factor is dropped, counted and listed, as
under `drop`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from vlmpack.data.index.columns_file import Column, ColumnsFile, Numbers, Texts, runs
from vlmpack.data.index.groups import SamplePrefixes, group_numbers
from vlmpack.data.index.held_out import OPENING
from vlmpack.data.index.lengths import CHOSEN, COUNTS, SampleText, prefixes_of_text
from vlmpack.data.index.rollouts import ROLLOUT_COLUMNS, RolloutColumns
from vlmpack.data.index.table_file import DEFAULTS, DIGESTS, LARGE, PREFIXES, STAMPS
from vlmpack.data.protocols import ImageSize
from vlmpack.encode import Encoder, SampleLength
from vlmpack.errors import DataError
from vlmpack.storage.fetch import ShardStamp

GroupBy = Literal["none", "image", "group"]
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


class Keys(Protocol):
    """Texts, one a sample."""

    def __getitem__(self, rows: slice, /) -> list[str]:
        """Those of a run of samples."""

    def find(self, text: str) -> list[int]:
        """The samples that have a text."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Columns over all N samples of a split.

    Args:
        shard_starts: (S + 1,) the number of each shard's first sample.
        source_starts: (D + 1,) the number of each source's first sample.
        offsets, lengths, crc32s: (N,) int64, the spans.
        num_tokens, num_image_tokens, num_label_tokens, num_patches: (N,) int64.
        bad: (N,) bool, samples with a reason.
        faults: number -> (error class, reason) of the bad ones.
        shrunk: number -> target (width, height) of each image, where the plan shrank them.
        unknown_keys: keys of the records that are not read -> records.
        num_chosen_tokens: (N,) int64, of a pair's first sequence; None without pairs.
        images_digests: (N,) int64 of each sample's images, 0 for none; None where unused.
        branches: (N,) int64, which of their record's samples they are, in order; -1 where a record
            is one sample. None where all are.
        prefixes: where samples may branch; None where unused.
        rows: (N,) int64, of records in their spans; None where all are samples of shards.
        image_stamps: JSON of where images lie in a store; None where no image does.
        objects: how objects were written; empty where no sample has some.
        openings: (N,) int64, what each record asks (`held_out`); None where unused.
        contents: (S,) a digest of what each shard holds.
        lengths_digest: of the lengths of all samples.
        rollouts: what samplers said; None where samples are no rollouts.
    """

    shards: tuple[ShardStamp, ...]
    shard_starts: Int64s
    source_starts: Int64s
    offsets: Numbers
    lengths: Numbers
    crc32s: Numbers
    num_tokens: Numbers
    num_image_tokens: Numbers
    num_label_tokens: Numbers
    num_patches: Numbers
    bad: Bools
    keys: Keys
    faults: dict[int, tuple[str, str]]
    shrunk: dict[int, tuple[ImageSize, ...]]
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    num_chosen_tokens: Numbers | None = None
    images_digests: Numbers | None = None
    branches: Numbers | None = None
    prefixes: SamplePrefixes | None = None
    rows: Numbers | None = None
    image_stamps: Texts | None = None
    objects: str = ""
    openings: Numbers | None = None
    contents: Sequence[str] = ()
    lengths_digest: str = ""
    rollouts: RolloutColumns | None = None

    @property
    def num_samples(self) -> int:
        """N, bad samples included."""
        return int(self.offsets.shape[0])

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) tokens and (n,) vision patches of samples."""
        return self.num_tokens[numbers], self.num_patches[numbers]

    def sequence_tokens(self, numbers: Int64s) -> Int64s:
        """(n, k) tokens of each sequence of samples: 2 of a pair, else 1."""
        tokens: Int64s = self.num_tokens[numbers]
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

    def groups(self, numbers: Int64s, by: GroupBy) -> Int64s | None:
        """(n,) the group of each sample: branches of a record, and samples with equal `digests`.
        Groups are named after their first sample. None where all are alone."""
        records, digests = numbers, self.digests(by)
        if self.branches is not None:
            records = numbers - np.maximum(self.branches[numbers], 0)
        elif digests is None:
            return None
        return records if digests is None else group_numbers(records, digests[numbers])

    def digests(self, by: GroupBy) -> Numbers | None:
        """(N,) int64, equal for samples that stand together; 0 for one that is alone."""
        if by == "group":
            return None if self.rollouts is None else self.rollouts.groups
        return self.images_digests if by == "image" else None

    def sources(self, numbers: Int64s) -> Int64s:
        """(n,) the place of each sample's source."""
        return np.searchsorted(self.source_starts, numbers, side="right") - 1

    def shard_of(self, number: int) -> int:
        """The place of a sample's shard in `shards`."""
        return int(np.searchsorted(self.shard_starts, number, side="right")) - 1

    def key(self, number: int) -> str:
        """A sample's key."""
        return self.keys[number : number + 1][0]

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
        [text] = self.image_stamps[number : number + 1]
        return tuple(ShardStamp(**stamp) for stamp in json.loads(text or "[]"))


def table_of(file: ColumnsFile, sources: Sequence[Sequence[ShardStamp]]) -> SampleTable:
    """The table of the shards of each source, from its file."""

    def column(name: str) -> Numbers:
        numbers = file.column(name, DEFAULTS.get(name, 0))
        return numbers if file.num_rows >= LARGE else numbers[:]

    def if_there(name: str) -> Numbers | None:
        return column(name) if file.has(name) else None

    shard_starts = starts_of(file.facts["shard_counts"])
    reasons = [(name, why) for name, why, count in file.facts["faults"] for _ in range(count)]
    numbers = file.numbers(file.facts["bad"], 0, len(reasons))
    bad = np.zeros(file.num_rows, dtype=np.bool_)
    bad[numbers] = True
    return SampleTable(
        shards=tuple(stamp for source in sources for stamp in source),
        shard_starts=shard_starts,
        source_starts=shard_starts[starts_of([len(source) for source in sources])],
        offsets=column("offset"),
        lengths=column("length"),
        crc32s=column("crc32"),
        **{name: column(name) for name in COUNTS},
        bad=bad,
        keys=Texts(file, "key"),
        faults={int(numbers[place]): reasons[place] for place in np.argsort(numbers)},
        shrunk={},
        unknown_keys=file.facts["unknown_keys"],
        num_chosen_tokens=if_there(CHOSEN),
        prefixes=_prefixes(file),
        branches=column("branch") if file.has("branch", unless=-1) else None,
        images_digests=column(DIGESTS),
        rows=if_there("row"),
        image_stamps=Texts(file, STAMPS) if file.has(STAMPS) else None,
        objects=file.facts["objects"],
        openings=file.column(OPENING, DEFAULTS[OPENING]),  # read where a share is held out
        contents=file.facts["contents"],
        lengths_digest=file.facts["lengths"],
        rollouts=RolloutColumns(*map(column, ROLLOUT_COLUMNS))
        if file.has(ROLLOUT_COLUMNS[0])
        else None,
    )


def _prefixes(file: ColumnsFile) -> SamplePrefixes | None:
    most = next(k for k in count() if not file.has(f"{PREFIXES[0]}.{k}"))
    columns = [[file.column(f"{name}.{k}", 0)[:] for k in range(most)] for name in PREFIXES]
    return SamplePrefixes(*(np.stack(each, axis=1) for each in columns)) if most else None


def starts_of(counts: Sequence[int]) -> Int64s:
    """(n + 1,) where each of n runs begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(np.asarray(counts, dtype=np.int64)))).astype(np.int64)


def int64s(table: Any, name: str) -> Int64s:
    """A column of a pyarrow table."""
    column = table.column(name).to_numpy()
    return np.ascontiguousarray(column, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The numbers of some samples of a run, in order, as an array would have them. Only those that
    are left out take memory.

    Args:
        first: the run's first sample.
        gaps: (g,) how many samples are chosen before each that is left out.
    """

    first: int
    shape: tuple[int]
    gaps: Int64s

    def __getitem__(self, where: Any, /) -> Any:
        """See Numbers."""
        places = np.arange(*where.indices(self.shape[0])) if isinstance(where, slice) else where
        return self.first + places + np.searchsorted(self.gaps, places, side="right")


def chosen(mask: Bools, first: int = 0) -> Numbers:
    """The numbers of the samples from `first` on that a mask (n,) has."""
    size = int(np.count_nonzero(mask))
    if mask.shape[0] < LARGE or 2 * size < mask.shape[0]:
        return np.flatnonzero(mask).astype(np.int64) + first
    left_out = np.flatnonzero(~mask)
    return Chosen(first, (size,), left_out - np.arange(left_out.size))


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

    def good(self, start: int = 0, stop: int | None = None) -> Iterator[Int64s]:
        """The samples from `start` to `stop` that train and are not known to be bad, by spans."""
        stop = self.table.num_samples if stop is None else stop
        for run in runs(start, stop):
            yield np.flatnonzero(self.eligible[run] & ~self.table.bad[run]) + run.start

    def sizes(self) -> Iterator[tuple[Int64s, Int64s]]:
        """(n,) tokens and (n,) vision patches of the samples that the plan may use, by spans."""
        for run in runs(0, self.table.num_samples):
            yield self.table.sizes(np.flatnonzero(self.eligible[run]) + run.start)

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
    found = (
        np.flatnonzero(~limits.fit(table.num_tokens[run], table.num_patches[run])) + run.start
        for run in runs(0, table.num_samples)
    )
    over = np.concatenate([np.empty(0, np.int64), *found])
    if over.size == 0:  # takes no memory
        return Fitted(table, np.broadcast_to(np.True_, (table.num_samples,)), ())
    eligible = np.ones(table.num_samples, dtype=np.bool_)
    if policy == "error":
        raise _too_long(table, over, limits)
    names = COUNTS if table.num_chosen_tokens is None else (*COUNTS, CHOSEN)
    changes: dict[str, list[int]] = {name: [] for name in names}
    shrunk: dict[int, tuple[ImageSize, ...]] = {}
    dropped: list[Dropped] = []
    prefixes: dict[int, Sequence[tuple[int, int]]] = {}
    names_of_sizes = ("num_tokens", "num_patches", "num_image_tokens")
    sizes = zip(*(getattr(table, name)[over].tolist() for name in names_of_sizes), strict=True)
    for number, size in zip(over.tolist(), sizes, strict=True):
        fitting = None
        if policy == "shrink_images":
            text = read_text(number)
            fitting = shrink_to_fit(text, encoder, limits)
        if fitting is None:
            eligible[number] = False
            dropped.append(Dropped(number, _drop_reason(size, policy, limits)))
            continue
        shrunk[number] = fitting[0]
        prefixes[number] = prefixes_of_text(encoder, text, fitting[0])
        for name, values in changes.items():
            values.append(getattr(fitting[1], name))
    prefixes_left = None if table.prefixes is None else table.prefixes.replaced(prefixes)
    columns: dict[str, Any] = {
        name: changed(getattr(table, name), [*shrunk], values) for name, values in changes.items()
    }
    fitted = replace(table, shrunk=shrunk, prefixes=prefixes_left, **columns)
    return Fitted(fitted, eligible, tuple(dropped))


def changed(column: Numbers, places: Sequence[int], values: Sequence[int]) -> Numbers:
    """A column with other values at some places, which ascend."""
    if not places:
        return column
    if isinstance(column, Column):
        return column.with_changes(np.asarray(places, np.int64), np.asarray(values, np.int64))
    copy = np.array(column)
    copy[list(places)] = values
    return copy


def _drop_reason(sizes: Sequence[int], policy: OverLong, limits: SampleLimits) -> str:
    tokens, patches, image_tokens = sizes
    reason = limits.excess(tokens, patches)
    if tokens <= limits.seq_length:
        return reason + (", and no smaller size of its images fits" if policy != "drop" else "")
    if policy == "shrink_images":
        text = tokens - image_tokens
        reason += f", and the {text} tokens of text leave too little room for images"
    return reason


def _too_long(table: SampleTable, over: Int64s, limits: SampleLimits) -> DataError:
    longer = over[table.num_tokens[over] > limits.seq_length]
    worst, column, knob = longer, table.num_tokens, "training.seq_length"
    one = (longer.size or over.size) == 1
    above = f"{'is' if one else 'are'} longer than {knob} {limits.seq_length} tokens"
    most = "longest"
    kind = "samples"
    if table.num_chosen_tokens is not None:
        kind, above = "pairs", f"{above} (both sequences of a pair together)"
    if not longer.size:
        worst, column, knob = over, table.num_patches, "packing.max_vision_patches"
        above = f"{'has' if one else 'have'} more vision patches than {knob} {limits.max_patches}"
        most = "largest"
    worst = worst[np.argsort(-column[worst], kind="stable")]
    shown = ", ".join(f"{table.key(number)!r} {column[number]}" for number in worst[:5].tolist())
    text = table.num_tokens[worst] - table.num_image_tokens[worst]
    others = "drop" if (text > limits.seq_length).all() else "drop or shrink_images"
    return DataError(
        f"{len(worst)} of {table.num_samples} {kind} {above}; the {most}: {shown}. Raise "
        f"{knob}, or set data.over_long to {others}",
        error_class="too_long",
        key=table.key(int(worst[0])) if one else None,
        shard=table.shards[table.shard_of(int(worst[0]))].path if one else None,
    )
