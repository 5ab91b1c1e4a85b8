"""One epoch under every packing mode, for comparison.

The recipe's own mode is planned as the run plans it. Other modes use the same samples, limits and
`training.global_batch_size`. If the recipe's micro-batch size has no meaning for them, they take as
many samples as fill one of its rows on average.

n samples lie in b bins, a bin is a micro-batch, and s global batches consist of bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.table import Fitted, Int64s
from vlmpack.data.modes import MODES, PackingMode, RowShape
from vlmpack.data.plan.batches import Plan, Position, seeded_order
from vlmpack.data.plan.packers import (
    Bin,
    HeldRows,
    PlannedSamples,
    Scope,
    Sizes,
    held_rows,
    planned_samples,
)
from vlmpack.data.plan.packs import PackArrays, PackPlan
from vlmpack.data.plan.rank_bins import RowCost
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits.indexed import make_plan
from vlmpack.data.splits.split import Split, first_epoch
from vlmpack.forecast.figures import ModeFigures, Progress, SourceFigures, counted
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe.schema import ModeName


@dataclass(frozen=True)
class Layout:
    """The global batches of one epoch.

    Args:
        numbers, tokens, patches: (n,) of the samples in the order of their bins. A known hole has
            no token.
        bins: (b,) samples in each bin, none of them 0.
        steps: (s,) bins of each global batch.
        sequences: (n, k) tokens of each sequence of the samples: 2 of a pair, else 1.
    """

    numbers: Int64s
    tokens: Int64s
    patches: Int64s
    bins: Int64s
    steps: Int64s
    sequences: Int64s

    @cached_property
    def squares(self) -> Int64s:
        """(n,) sum of the squared lengths of each sample's sequences."""
        squares: Int64s = (self.sequences**2).sum(axis=1)
        return squares

    @cached_property
    def bin_starts(self) -> Int64s:
        """(b,) the place of each bin's first sample."""
        return np.cumsum(self.bins) - self.bins

    @cached_property
    def step_starts(self) -> Int64s:
        """(s,) the place of each global batch's first bin."""
        return np.cumsum(self.steps) - self.steps

    def by_bin(self, values: Int64s) -> Int64s:
        """(b,) sums of (n,) values of samples."""
        return np.add.reduceat(values, self.bin_starts) if values.size else values

    def longest_by_bin(self, values: Int64s) -> Int64s:
        """(b,) maxima of (n,) values of samples."""
        return np.maximum.reduceat(values, self.bin_starts) if values.size else values

    def sets(self) -> list[Int64s]:
        """The places of the samples of each global batch."""
        if not self.steps.size:
            return []
        counts = np.add.reduceat(self.bins, self.step_starts)
        return np.split(np.arange(self.numbers.size), np.cumsum(counts)[:-1])

    def packed_as(self, packs: Sequence[Int64s], steps: Int64s) -> Layout:
        """The same samples, or some of them, in other bins.

        Args:
            packs: the places of each bin's samples.
            steps: (s,) bins of each global batch.
        """
        order = np.concatenate([np.empty(0, np.int64), *packs])
        return Layout(
            self.numbers[order],
            self.tokens[order],
            self.patches[order],
            np.fromiter(map(len, packs), np.int64, len(packs)),
            steps,
            self.sequences[order],
        )

    @cached_property
    def trained(self) -> Int64s:
        """(b,) samples of each bin that are no holes."""
        return self.by_bin((self.tokens > 0).astype(np.int64))


def layout_of(
    windows: Iterable[Sequence[tuple[Bin, ...]]],
    sizes: Sizes,
    sequence_tokens: Callable[[Int64s], Int64s],
) -> Layout:
    """The layout of an epoch.

    Args:
        windows: the global batches of each window, as a packer makes them.
        sequence_tokens: (n, k) tokens of each of their sequences.
    """
    rows = PackArrays.of(windows)
    numbers = rows.numbers
    sequences = sequence_tokens(numbers)
    return Layout(numbers, *sizes(numbers), rows.sizes, np.diff(rows.batches), sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The computation for each bin.

    Args:
        rows: (b,) rows.
        slots: (b,) tokens and padding.
        squares: (b,) sum of the squared lengths that attention runs over.
        empty_slots: slots of a bin without samples.
    """

    rows: Int64s
    slots: Int64s
    squares: Int64s
    empty_slots: int


def lay_out(layout: Layout, shape: RowShape, shared: Int64s | None = None) -> Rows:
    """Rows and slots of every bin, as `PackCollator` and `PadCollator` make them.

    Args:
        shared: (b,) slots of each bin's segments, if they share prefixes. Attention then counts as
            for the samples alone, which is more.
    """
    trained = layout.trained
    if shape.padded:
        width = _up(layout.longest_by_bin(layout.sequences.max(axis=1)), shape.row_multiple)
        width = np.maximum(width, shape.row_multiple)
        each = layout.sequences.shape[1]
        rows = np.maximum(trained * each, 1)  # a bin of holes is one row of padding
        return Rows(
            rows=rows, slots=rows * width, squares=rows * width**2, empty_slots=shape.row_multiple
        )
    physical = _up(layout.sequences, shape.sequence_multiple)
    filled = layout.by_bin(physical.sum(axis=1)) if shared is None else shared
    least = max(shape.sequence_multiple, shape.row_multiple, shape.width)
    most = trained.max(initial=0) if shape.most_filled is None else shape.most_filled
    width = np.where(trained <= most, shape.width, 0)
    slots = np.where(trained > 0, np.maximum(_up(filled, shape.row_multiple), width), least)
    squares = layout.by_bin((physical**2).sum(axis=1)) + (slots - filled) ** 2
    return Rows(rows=np.ones_like(slots), slots=slots, squares=squares, empty_slots=least)


def empty_bins(layout: Layout, copies: int) -> int:
    """Bins without samples that fill global batches up, so that all model copies take part."""
    return int((-layout.steps % copies).sum())


def _up(values: Int64s, multiple: int) -> Int64s:
    return -(-values // multiple) * multiple


Windows = Iterator[Sequence[tuple[Bin, ...]]]

LONG_EPOCH = 10_000_000
"""Samples of an epoch above which figures of rows are those of some of its windows."""
DRAWN_SAMPLES = 1_000_000
"""About so many samples are in these windows."""

MAX_PACKED = 131_072
"""Samples from which a mode that the recipe does not have is packed; beyond, it is carried over."""

OFFLINE: Mapping[Scope, str] = {"stream": "offline, bfd", "batch": "offline, batch"}
"""Mode `offline` before its packs are made, by scope."""
SHARED = "offline, shared"
"""The same where rows have what samples begin with once: packs are then online's rows."""


@dataclass(frozen=True, kw_only=True)
class PlannedMode:
    """One mode's first epoch.

    Args:
        mode: with the budget that it was cut by.
        micro_batch_size: samples in a micro-batch; 1 where rows are planned.
        is_recipes: whether the run does this.
        is_part: whether the layout is only a part of the epoch.
        num_steps: global batches of the epoch, where they are known without its layout.
        own_name: shown in place of the mode's name, if it stands for packs that are not made yet.
        planned: what is planned of samples, if rows share prefixes.
    """

    mode: PackingMode
    layout: Layout
    micro_batch_size: int
    is_recipes: bool = False
    is_part: bool = False
    num_steps: int | None = None
    own_name: str = ""
    planned: PlannedSamples | None = None

    @property
    def name(self) -> str:
        return self.own_name or self.mode.label

    @cached_property
    def rows(self) -> Rows:
        held = self.held
        return lay_out(self.layout, self.mode.shape(), None if held is None else held.slots)

    @cached_property
    def held(self) -> HeldRows | None:
        """The contents of the rows, with shared prefixes once. None if nothing is shared."""
        shape = self.mode.shape()
        if self.planned is None or shape.padded:
            return None
        return held_by(self.layout, self.planned, shape.sequence_multiple)

    @property
    def held_tokens(self) -> int:
        """Tokens that the rows hold, with shared ones once."""
        return int((self.layout if self.held is None else self.held).tokens.sum())

    def image_sums(self, values: Int64s) -> Int64s:
        """(b,) sums over each bin of an image property. Images that samples share count once.

        Args:
            values: (n,) of the samples.
        """
        if self.held is None:
            return self.layout.by_bin(values)
        return shown_by(self.layout, self.held, values)

    @property
    def plans_rows(self) -> bool:
        return self.mode.facts.plans_rows

    @property
    def counts_rows(self) -> bool:
        return self.mode.packing.counts_rows


@dataclass(frozen=True, kw_only=True)
class ModePlanner:
    """Plans modes for one split."""

    config: DataConfig
    fitted: Fitted
    budget: RowBudget
    progress: Progress

    def own(self, split: Split) -> PlannedMode:
        plan, mode = split.plan, self.config.mode
        windows: Windows
        if isinstance(plan, WindowPlan):
            # Its windows are not known beforehand: global batch by global batch.
            total = None
            is_part = split.epoch_length().num_samples > LONG_EPOCH
            walked = (batch.bins for batch in first_epoch(split))
            windows = ([bins] for bins in (_first_samples(walked) if is_part else walked))
        else:
            places = self.shown_windows(plan)
            total, is_part = len(places), len(places) < plan.num_windows
            windows = (plan.packed(Position(0, window)) for window in places)
        counts = counted(windows, f"packing: {mode.label}", total, self.progress)
        return PlannedMode(
            mode=mode,
            layout=layout_of(counts, split.sizes, split.sequence_tokens),
            micro_batch_size=self.config.training.micro_batch_size,
            is_recipes=True,
            is_part=is_part,
            num_steps=None if isinstance(plan, WindowPlan) else _num_steps(plan),
            planned=planned_of(split),
        )

    def shown_windows(self, plan: Plan | PackPlan) -> list[int]:
        """The windows of the first epoch whose rows are shown: all, or those that the seed draws
        from a long epoch. Packs are made already."""
        count = plan.num_windows
        if plan.epoch_size <= LONG_EPOCH or isinstance(plan, PackPlan):
            return list(range(count))
        most = ceil(DRAWN_SAMPLES * count / plan.epoch_size)
        drawn = seeded_order(count, self.config.training.seed, "figures")[:most]
        return sorted(drawn.tolist())

    def mode(self, name: ModeName, scope: Scope = "stream") -> PackingMode:
        """A mode that the recipe need not have, with the recipe's limits."""
        own = self.config.mode
        packing = own.packing.model_copy(update={"mode": name, "scope": scope})
        return MODES[name](packing=packing, budget=self.budget, multiples=own.multiples)

    def other(self, mode: PackingMode, micro: int = 1) -> PlannedMode:
        """An epoch in another mode; of planned rows, whole windows of about MAX_PACKED samples."""
        training = self.config.training.model_copy(update={"micro_batch_size": micro})
        data = self.config.data
        if self.fitted.table.images_digests is None:  # packs that hold the samples have none
            data = data.model_copy(update={"group_by": "none"})
        config = replace(self.config, mode=mode, training=training, data=data)
        plan, _ = make_plan(config, self.fitted, "global")
        places = self.shown_windows(plan)
        if mode.facts.plans_rows:
            places = places[: -(-MAX_PACKED // plan.window)]
        windows = (plan.packed(Position(0, window)) for window in places)
        counts = counted(windows, f"packing: {mode.label}", len(places), self.progress)
        table = self.fitted.table
        layout = layout_of(counts, table.sizes, table.sequence_tokens)
        return PlannedMode(
            mode=mode,
            layout=layout,
            micro_batch_size=micro,
            is_part=len(places) < plan.num_windows,
            num_steps=_num_steps(plan),
            planned=None if table.prefixes is None else partial(planned_samples, table),
        )

    def offline_shared(self, online: PlannedMode, scope: Scope, *, is_recipes: bool) -> PlannedMode:
        """Mode `offline` with the planner `stream`, which is used for packs that share prefixes."""
        mode = self.mode("offline", scope)
        return replace(online, mode=mode, is_recipes=is_recipes, own_name=SHARED)

    def offline(self, own: PlannedMode, scope: Scope, *, is_recipes: bool) -> PlannedMode:
        """Mode `offline` with the planner `bfd`: as `vlmpack.data.packs.write` has it.

        Args:
            own: has the samples.
            scope: `batch` keeps packs inside the global batches of its layout.
            is_recipes: whether the run does this; then all of them are packed.
        """
        samples, is_part = own.layout, own.is_part
        most = samples.numbers.size if is_recipes else MAX_PACKED
        size, planned = (
            self.config.training.global_batch_size,
            self.budget.planned(samples.sequences),
        )
        steps: list[Int64s] = []
        packs: list[Int64s] = []
        for places in samples.sets() if scope == "batch" else [np.arange(samples.numbers.size)]:
            places = places[places < most]
            places = places[np.argsort(samples.numbers[places], kind="stable")]
            packed = self.budget.packs(planned[places], samples.patches[places])
            packs += [places[pack] for pack in packed]
            steps.append(np.array([len(packed)] if packed else [], np.int64))
        if scope == "stream":
            # Neighbours of best-fit-decreasing are alike; a run permutes the packs.
            order = seeded_order(len(packs), self.config.training.seed, "packs")
            packs = [packs[place] for place in order.tolist()]
            steps = [np.diff(np.append(np.arange(0, len(packs), size), len(packs)))]
        return PlannedMode(
            mode=self.mode("offline", scope),
            layout=samples.packed_as(packs, np.concatenate(steps)),
            micro_batch_size=1,
            is_recipes=is_recipes,
            is_part=is_part or samples.numbers.size > most,
            own_name=OFFLINE[scope],
        )


def _first_samples(batches: Iterable[tuple[Bin, ...]]) -> Iterator[tuple[Bin, ...]]:
    """The first global batches, until they have DRAWN_SAMPLES."""
    taken = 0
    for bins in batches:
        yield bins
        taken += sum(map(len, bins))
        if taken >= DRAWN_SAMPLES:
            return


def _num_steps(plan: Plan | PackPlan) -> int | None:
    """Global batches of an epoch, where nothing is packed to count them."""
    return None if plan.packer.num_batches(1) is None else plan.num_steps(0)


@dataclass(frozen=True, slots=True)
class EpochTotals:
    """What every mode trains in an epoch. Holes are not counted.

    Args:
        steps: global batches where they do not depend on the rows.
    """

    samples: int
    tokens: int
    patches: int
    steps: int

    @classmethod
    def of(cls, none: PlannedMode, total: SourceFigures, *, all_once: bool) -> EpochTotals:
        """From mode `none`, and from the index where its layout is a part of the epoch.

        Args:
            all_once: whether the epoch has every sample once. Else the totals of a part are
                extrapolated.
        """
        layout, scale = none.layout, 1.0
        if none.is_part and all_once:
            sums = (total.num_usable, total.num_tokens, total.num_patches)
        else:
            sums = (int(layout.trained.sum()), int(layout.tokens.sum()), int(layout.patches.sum()))
            scale = total.num_drawn / max(1, layout.numbers.size) if none.is_part else 1.0
        steps = int(layout.steps.size) if none.num_steps is None else none.num_steps
        samples, tokens, patches = (round(each * scale) for each in sums)
        return cls(samples, tokens, patches, steps)


def planned_of(split: Split) -> PlannedSamples | None:
    """The plan of samples by their numbers in the split's plan; None if none share a prefix."""
    table = split.fitted.table
    if table.prefixes is None:
        return None
    return lambda numbers: planned_samples(table, split.places(numbers))


def mode_figures(
    mode: PlannedMode, copies: int, costs: RowCost, unpacked: PlannedMode, whole: EpochTotals
) -> ModeFigures:
    """The figures of a mode.

    Args:
        unpacked: mode `none`.
    """
    layout, rows = mode.layout, mode.rows
    empty = empty_bins(layout, copies)
    tokens, samples = whole.tokens, whole.samples
    scale = tokens / max(1, int(layout.tokens.sum())) if mode.is_part else 1.0
    of_unpacked = tokens / max(1, int(unpacked.layout.tokens.sum())) if unpacked.is_part else 1.0
    # Only where rows are counted does the number of steps depend on the packing.
    steps = ceil(layout.steps.size * scale) if mode.counts_rows else whole.steps
    slots = int(rows.slots.sum()) + empty * rows.empty_slots
    return ModeFigures(
        name=mode.name,
        is_recipes=mode.is_recipes,
        is_estimated=mode.is_part,
        micro_batch_size=mode.micro_batch_size,
        steps=steps,
        counts_rows=mode.counts_rows,
        samples=samples,
        rows=round(int(rows.rows.sum()) * scale),
        tokens=tokens,
        held_tokens=round(mode.held_tokens * scale),
        slots=round(slots * scale),
        empty_rows=round(empty * scale),
        row_tokens=mode.mode.budget.max_tokens if mode.plans_rows else 0,
        vision_patches=whole.patches,
        compute=_epoch_cost(mode, costs)
        * scale
        / max(1e-9, _epoch_cost(unpacked, costs) * of_unpacked),
        max_row_slots=int(rows.slots.max(initial=0)),
        max_row_patches=int(mode.image_sums(layout.patches).max(initial=0)),
        mean_batch_samples=samples / max(1, steps),
        mean_batch_tokens=tokens / max(1, steps),
    )


def _epoch_cost(mode: PlannedMode, costs: RowCost) -> float:
    rows, layout = mode.rows, mode.layout
    patches, squares = (mode.image_sums(layout.patches**power) for power in (1, 2))
    return float(costs(rows.slots, rows.squares, patches, patch_squares=squares).sum())


def held_by(layout: Layout, planned: PlannedSamples, multiple: int) -> HeldRows:
    """The contents of the bins of a layout, in one pass over its samples.

    Args:
        multiple: that segments are rounded up to.
    """
    return held_rows(planned(layout.numbers), layout.bins.tolist(), multiple)


def shown_by(layout: Layout, held: HeldRows, values: Int64s) -> Int64s:
    """(b,) sums over each bin of an image property, where shared images count once.

    Args:
        values: (n,) of the samples: their patches, say.
    """
    return layout.by_bin(np.where(held.starts_anew, values, 0))


def sharing_note(layout: Layout, held: HeldRows) -> str:
    """A note of the tokens and vision patches that sharing saves in an epoch, and of the groups.

    The arguments are those of `shown_by`.
    """
    starts = np.append(held.starts_anew[layout.tokens > 0], True)
    sizes = np.diff(np.flatnonzero(starts))
    groups, grouped = int((sizes > 1).sum()), int(sizes[sizes > 1].sum())
    tokens, alone = int(held.tokens.sum()), int(layout.tokens.sum())
    patches = int(shown_by(layout, held, layout.patches).sum())
    images = int(layout.patches.sum())
    return (
        f"packing.share_prefix: an epoch's rows hold {tokens:,} tokens where its samples alone "
        f"have {alone:,} ({alone / max(1, tokens):.2f} times as many). The tower computes "
        f"{patches:,} patches instead of {images:,} ({images / max(1, patches):.2f} times). "
        f"{grouped:,} samples share something, in groups of {grouped / max(1, groups):.1f}"
    )
