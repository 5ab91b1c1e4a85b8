"""The packer of a split, and the size of the windows it works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.batches import Plan, PlanSource, Shuffle
from vlmpack.data.plan.packers import (
    STREAMED_SAMPLES_PER_ROW,
    BudgetPacker,
    FixedPacker,
    Sizes,
    window_samples,
)
from vlmpack.data.plan.state import IdentityValue
from vlmpack.packing.budget import RowBudget

DRY_RUN_SAMPLES = 65_536
_NO_ROWS = FixedPacker(1, 1)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a split's order is cut.

    Args:
        packer: cuts a window's order into global batches.
        window: samples in a window.
    """

    packer: FixedPacker | BudgetPacker
    window: int

    @property
    def identity(self) -> dict[str, IdentityValue]:
        """What of it decides the order, beside the fields that every mode has."""
        if not isinstance(self.packer, BudgetPacker):
            return {}
        budget = self.packer.budget
        return {
            **budget.knobs,
            "packing.scope": self.packer.scope,
            "window": self.window,
        }


def cut_indexed(
    config: DataConfig, sources: Sequence[PlanSource], shuffle: Shuffle, sizes: Sizes
) -> Cutting:
    """For a split whose samples are all known: settled by a dry run over its first samples."""
    budget = config.budget
    if budget is None:
        return _fixed(config)
    if config.scope == "batch" and budget.max_sequences is not None:
        return _budgeted(config, budget, sizes, samples_per_row=0)  # nothing is left to settle
    assert shuffle != "window"
    order = dry_run_order(sources, config.seed, shuffle)
    rows = budget.rows(*sizes(order))
    per_row = -(-order.shape[0] // max(1, len(rows)))
    return _budgeted(config, budget.settled(rows), sizes, samples_per_row=per_row)


def cut_streamed(config: DataConfig, sizes: Sizes) -> Cutting:
    """For a split of which nothing need be known."""
    if config.budget is None:
        return _fixed(config)
    return _budgeted(
        config, config.budget.settled(None), sizes, samples_per_row=STREAMED_SAMPLES_PER_ROW
    )


def dry_run_order(
    sources: Sequence[PlanSource], seed: int, shuffle: Literal["global", "none"]
) -> Int64s:
    """(n,) the first samples of a plan, at most DRY_RUN_SAMPLES, in the order in which a run packs
    them."""
    dry = Plan(sources, seed=seed, shuffle=shuffle, window=DRY_RUN_SAMPLES, packer=_NO_ROWS)
    return dry.window_order(0, 0) if dry.num_windows else np.empty(0, np.int64)


def _fixed(config: DataConfig) -> Cutting:
    packer = FixedPacker(config.global_batch_size, config.micro_batch_size)
    return Cutting(packer, window_samples(config.global_batch_size))


def _budgeted(
    config: DataConfig, budget: RowBudget, sizes: Sizes, *, samples_per_row: int
) -> Cutting:
    packer = BudgetPacker(
        budget=budget,
        global_batch_size=config.global_batch_size,
        scope=config.scope,
        sizes=sizes,
    )
    in_rows = config.scope == "stream"
    return Cutting(
        packer, window_samples(config.global_batch_size, samples_per_row if in_rows else 0)
    )
