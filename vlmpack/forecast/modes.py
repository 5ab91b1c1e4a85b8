"""One epoch under every packing mode, side by side.

The recipe's own mode is planned as the run plans it. The others take its samples, its limits and
its `training.global_batch_size`; where the recipe's micro-batch says nothing about them, they take
as many samples as fill one of its rows on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from typing import Literal

import numpy as np

from vlmpack.alignment import Alignment
from vlmpack.data.config import DataConfig
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.batches import Plan, Position, seeded_order
from vlmpack.data.plan.packers import Bin, Scope
from vlmpack.data.plan.packs import PackPlan
from vlmpack.data.plan.shares import RowCost
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits.indexed import make_plan
from vlmpack.data.splits.split import Split, first_epoch
from vlmpack.forecast.figures import ModeFigures
from vlmpack.forecast.layout import Layout, Rows, RowShape, empty_bins, lay_out, layout_of
from vlmpack.forecast.progress import Progress, counted
from vlmpack.packing.budget import RowBudget

Windows = Iterator[Sequence[tuple[Bin, ...]]]

MAX_PACKED = 131_072
"""Samples from which a mode that the recipe does not have is packed; beyond, it is carried over."""

STREAM, BATCH = "online, stream", "online, batch"
OFFLINE, SAVED = "offline, bfd", "offline, saved"


@dataclass(frozen=True, kw_only=True)
class PlannedMode:
    """One mode's first epoch.

    Args:
        name: shown.
        layout: its global batches.
        rows: what is computed for them.
        micro_batch_size: samples in a micro-batch; 1 where rows are planned.
        budget: of a row, where rows are planned.
        counts_rows: whether a global batch is so many rows.
        is_recipes: whether the run does this.
        is_part: whether the layout is only the beginning of the epoch.
    """

    name: str
    layout: Layout
    rows: Rows
    micro_batch_size: int
    budget: RowBudget | None
    counts_rows: bool
    is_recipes: bool = False
    is_part: bool = False


@dataclass(frozen=True, kw_only=True)
class ModePlanner:
    """Plans modes for one split.

    Args:
        config: of the split, as the run has it.
        fitted: its samples.
        budget: of a planned row; the bound on sequences may be open.
        multiples: of segments and rows.
        width: that planned rows are filled up to; 0 for none.
        progress: told how many windows are planned.
    """

    config: DataConfig
    fitted: Fitted
    budget: RowBudget
    multiples: Alignment
    width: int
    progress: Progress

    def own(self, split: Split) -> PlannedMode:
        """The recipe's mode, as the run plans it."""
        config, plan = self.config, split.plan
        name: str = config.mode
        if config.mode == "online":
            name = STREAM if config.scope == "stream" else BATCH
        elif config.mode == "offline":
            name = SAVED
        budget = plan.packer.budget
        # A WindowPlan's windows are not known beforehand: global batch by global batch.
        walked = ([batch.bins] for batch in first_epoch(split))
        windows = walked if isinstance(plan, WindowPlan) else _windows(plan)
        total = None if isinstance(plan, WindowPlan) else plan.num_windows
        layout = layout_of(counted(windows, f"packing: {name}", total, self.progress), split.sizes)
        return self._mode(name, layout, budget, config.micro_batch_size, config.scope, own=True)

    def fixed(self, mode: Literal["none", "in_batch"], micro: int) -> PlannedMode:
        """Modes without a budget: `micro` samples to a micro-batch."""
        config = replace(self.config, mode=mode, budget=None, packs=None, micro_batch_size=micro)
        layout, _ = self._layout(config, mode, None)
        return self._mode(mode, layout, None, micro, "batch")

    def online(self, scope: Scope) -> PlannedMode:
        """Mode `online`."""
        config = replace(
            self.config,
            mode="online",
            budget=self.budget,
            packs=None,
            scope=scope,
            micro_batch_size=1,
        )
        name = STREAM if scope == "stream" else BATCH
        layout, is_part = self._layout(config, name, MAX_PACKED)
        return replace(self._mode(name, layout, self.budget, 1, scope), is_part=is_part)

    def offline(self, samples: Layout, *, is_recipes: bool) -> PlannedMode:
        """Mode `offline` with the planner `bfd`: as `vlmpack.data.packs.choose` has it."""
        budget, size = self.budget, samples.numbers.size
        most = size if is_recipes else MAX_PACKED
        order = np.argsort(samples.numbers[:most], kind="stable")
        tokens, patches = samples.tokens[order], samples.patches[order]
        packs = budget.packs(tokens, patches)
        # Neighbours of best-fit-decreasing are alike; a run permutes the packs.
        packs = [packs[n] for n in seeded_order(len(packs), self.config.seed, "packs").tolist()]
        order = np.concatenate([np.empty(0, np.int64), *packs])
        bins = np.fromiter(map(len, packs), np.int64, len(packs))
        whole = self.config.global_batch_size
        steps = np.full(-(-len(packs) // whole), whole, np.int64)
        if len(packs) % whole:
            steps[-1] = len(packs) % whole
        layout = Layout(samples.numbers[order], tokens[order], patches[order], bins, steps)
        mode = self._mode(OFFLINE, layout, budget, 1, "stream")
        return replace(mode, is_part=size > most, is_recipes=is_recipes)

    def _layout(self, config: DataConfig, name: str, most: int | None) -> tuple[Layout, bool]:
        """An epoch's global batches; whole windows of about `most` samples, and True, if it has
        more."""
        plan, _ = make_plan(config, self.fitted, "global")
        table = self.fitted.table

        def sizes(order: Int64s) -> tuple[Int64s, Int64s]:
            return table.num_tokens[order], table.num_patches[order]

        count = plan.num_windows
        if most is not None:
            count = min(count, -(-most // plan.window))
        windows = counted(islice(_windows(plan), count), f"packing: {name}", count, self.progress)
        return layout_of(windows, sizes), count < plan.num_windows

    def _mode(
        self,
        name: str,
        layout: Layout,
        budget: RowBudget | None,
        micro: int,
        scope: Scope,
        *,
        own: bool = False,
    ) -> PlannedMode:
        shape = RowShape(
            padded=name == "none",
            sequence_multiple=self.multiples.sequence,
            row_multiple=self.multiples.row,
            width=0 if budget is None else self.width,
        )
        return PlannedMode(
            name=name,
            layout=layout,
            rows=lay_out(layout, shape),
            micro_batch_size=micro,
            budget=budget,
            counts_rows=budget is not None and scope == "stream",
            is_recipes=own,
        )


def mode_figures(
    mode: PlannedMode, copies: int, costs: RowCost, unpacked: PlannedMode
) -> ModeFigures:
    """The figures of a mode.

    Args:
        copies: of the model.
        costs: of the model.
        unpacked: mode `none` over all samples of the epoch.
    """
    layout, rows, whole = mode.layout, mode.rows, unpacked.layout
    empty = empty_bins(layout, copies)
    tokens, samples = int(whole.tokens.sum()), int(whole.trained.sum())
    scale = tokens / max(1, int(layout.tokens.sum())) if mode.is_part else 1.0
    # Only where rows are counted does the number of steps depend on the packing.
    steps = ceil(layout.steps.size * scale) if mode.counts_rows else int(whole.steps.size)
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
        slots=round(slots * scale),
        empty_rows=round(empty * scale),
        row_tokens=0 if mode.budget is None else mode.budget.max_tokens,
        vision_patches=int(whole.patches.sum()),
        compute=_epoch_cost(mode, costs) * scale / max(1e-9, _epoch_cost(unpacked, costs)),
        max_row_slots=int(rows.slots.max(initial=0)),
        max_row_patches=int(layout.by_bin(layout.patches).max(initial=0)),
        mean_batch_samples=samples / max(1, steps),
        mean_batch_tokens=tokens / max(1, steps),
    )


def _epoch_cost(mode: PlannedMode, costs: RowCost) -> float:
    rows, layout = mode.rows, mode.layout
    patches = layout.by_bin(layout.patches)
    return float(
        costs(
            rows.slots, rows.squares, patches, patch_squares=layout.by_bin(layout.patches**2)
        ).sum()
    )


def _windows(plan: Plan | PackPlan) -> Windows:
    for window in range(plan.num_windows):
        yield plan.packed(Position(0, window))
