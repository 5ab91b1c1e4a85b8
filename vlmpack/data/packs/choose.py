"""Which samples share a pack: the online plan's first epoch, or best-fit-decreasing over all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.table import Int64s
from vlmpack.data.packs.manifest import Planner
from vlmpack.data.plan.packers import Bin
from vlmpack.data.plan.packs import PackArrays
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits.growing_index import SHARD_STRIDE
from vlmpack.data.splits.split import Split, first_epoch
from vlmpack.packing.budget import RowBudget


def choose_packs(split: Split, fitted: Fitted, planner: Planner, budget: RowBudget) -> PackArrays:
    """The packs of one epoch.

    Args:
        split: opened in mode `online`; its first epoch says which samples there are, and how often.
        fitted: the same samples, numbered from 0 in index order: as packs number them.
        planner: `stream` keeps the epoch's rows and global batches as they are.
        budget: of a pack.
    """
    windows = _windows(split, fitted)
    if planner == "stream":
        return PackArrays.of(windows)
    draws = np.sort(PackArrays.of(windows).numbers)
    packs = budget.packs(fitted.table.num_tokens[draws], fitted.table.num_patches[draws])
    return PackArrays.unordered([draws[places] for places in packs])


def _windows(split: Split, fitted: Fitted) -> list[list[tuple[Bin, ...]]]:
    """The packs of the global batches of each window of epoch 0."""
    windows: list[list[tuple[Bin, ...]]] = []
    place = -1
    for batch in first_epoch(split):
        if batch.position.window != place:
            windows.append([])
            place = batch.position.window
        windows[-1].append(_renumbered(split, fitted, batch.bins))
    return windows


def _renumbered(split: Split, fitted: Fitted, bins: Sequence[Bin]) -> tuple[Bin, ...]:
    """Bins with the samples' places in index order; a streamed plan numbers them by shard."""
    if not isinstance(split.plan, WindowPlan):
        return tuple(bins)
    starts: Int64s = fitted.table.shard_starts
    return tuple(
        tuple(int(starts[number // SHARD_STRIDE]) + number % SHARD_STRIDE for number in samples)
        for samples in bins
    )
