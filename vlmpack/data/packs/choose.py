"""Which samples share a pack: the online plan's first epoch, or best-fit-decreasing over all
samples, or inside each global batch of that plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.table import Int64s
from vlmpack.data.modes import PackingMode
from vlmpack.data.packs.manifest import Planner
from vlmpack.data.plan.packers import Bin
from vlmpack.data.plan.packs import PackArrays
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits.growing_index import SHARD_STRIDE
from vlmpack.data.splits.split import Split, first_epoch


def choose_packs(split: Split, fitted: Fitted, planner: Planner, mode: PackingMode) -> PackArrays:
    """The packs of one epoch.

    Args:
        split: opened in mode `online`; its first epoch says which samples there are, and how often.
        fitted: the same samples, numbered from 0 in index order: as packs number them.
        planner: `stream` keeps the epoch's rows and global batches as they are.
        mode: of the split, settled: what a pack holds, and whether packs stay inside the epoch's
            global batches (`packing.scope: batch`).
    """
    windows = _windows(split, fitted)
    if planner == "stream":
        return PackArrays.of(windows)
    budget = mode.budget

    def packed(draws: Int64s) -> list[Int64s]:
        draws = np.sort(draws)
        planned = budget.planned(fitted.table.sequence_tokens(draws))
        return [draws[n] for n in budget.packs(planned, fitted.table.num_patches[draws])]

    if mode.packing.counts_rows:
        return PackArrays.unordered(packed(PackArrays.of(windows).numbers))
    return PackArrays.of(
        [
            [tuple(map(_bin, packed(np.concatenate(batch)))) for batch in window]
            for window in windows
        ]
    )


def largest_buffer(arrays: PackArrays, fitted: Fitted, mode: PackingMode) -> int:
    """Samples that packs are chosen from, in the window or global batch that asks for most.

    Args:
        arrays: as `choose_packs` gives them.
        fitted: the samples.
        mode: that they were chosen by.
    """
    packs = arrays.batches if mode.packing.varies_in_rows else arrays.batches[arrays.windows]
    inner = arrays.starts[packs][1:-1].tolist()
    tokens = mode.budget.planned(fitted.table.sequence_tokens(arrays.numbers))
    return max(map(mode.budget.waiting, np.split(tokens, inner)))


def _bin(samples: Int64s) -> Bin:
    numbers: list[int] = samples.tolist()
    return tuple(numbers)


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
