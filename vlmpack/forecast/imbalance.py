"""How far apart the ranks of a step end, with bins dealt in turn and by cost.

The costs are FLOPs by `vlmpack.packing.cost`, of the language model and of the vision tower; no
time is measured, and kernels that run slower on short sequences are not in them.
"""

from __future__ import annotations

import numpy as np

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.shares import Floats, RowCost
from vlmpack.forecast.figures import ImbalanceFigures
from vlmpack.forecast.modes import PlannedMode
from vlmpack.packing import balance

MAX_STEPS = 64
"""Steps that are averaged at most: dealing one to 64 ranks takes up to 20 ms."""

MAX_RANKS = 64
MAX_SIZES = 5


def imbalance_figures(
    mode: PlannedMode, copies: int, row_cost: RowCost
) -> tuple[ImbalanceFigures, ...]:
    """For the run's model copies, and for other numbers of them that divide its global batch.

    Args:
        copies: of the model.
        row_cost: (n, k) costs of bins: language, then vision where the model has it.
    """
    layout = mode.layout
    if not layout.steps.size:
        return ()
    held = mode.held
    costs = row_cost(
        layout.by_bin(layout.tokens) if held is None else held.tokens,
        layout.by_bin(layout.squares) if held is None else held.squares,
        mode.image_sums(layout.patches),
        patch_squares=mode.image_sums(layout.patches**2),
    )
    whole = int(np.median(layout.steps))
    sizes = [2**k for k in range(1, 20) if 2**k <= min(whole, MAX_RANKS)]
    if mode.counts_rows or not mode.plans_rows:  # else nobody knows how many rows a batch has
        sizes = [size for size in sizes if whole % size == 0]
    chosen = sorted({copies, *sizes[-MAX_SIZES:]} - {1})
    places = _whole_steps(layout.steps, whole)
    steps = [
        costs[start : start + count]
        for start, count in zip(
            layout.step_starts[places].tolist(), layout.steps[places].tolist(), strict=True
        )
    ]
    return tuple(_for_ranks(steps, size, is_recipes=size == copies) for size in chosen)


def _whole_steps(steps: Int64s, whole: int) -> Int64s:
    """Places of at most MAX_STEPS global batches, spread; short ones only where all are."""
    places = np.flatnonzero(2 * steps >= whole)
    picked = np.linspace(0, places.size - 1, num=min(MAX_STEPS, places.size))
    return places[picked.astype(np.int64)]


def _for_ranks(steps: list[Floats], ranks: int, *, is_recipes: bool) -> ImbalanceFigures:
    dealt, balanced = [], []
    for costs in steps:
        filled = np.concatenate([costs, np.zeros((-len(costs) % ranks, costs.shape[1]))])
        turns = np.arange(len(filled)).reshape(-1, ranks).T
        dealt.append(_max_over_mean(filled, turns))
        balanced.append(_max_over_mean(filled, balance(filled, ranks)))
    mean_dealt, mean_balanced = np.mean(dealt, axis=0), np.mean(balanced, axis=0)
    return ImbalanceFigures(
        data_parallel=ranks,
        micro_batches=max(-(-len(costs) // ranks) for costs in steps),
        steps=len(steps),
        total_dealt=float(mean_dealt[0]),
        vision_dealt=float(mean_dealt[1]),
        total_balanced=float(mean_balanced[0]),
        vision_balanced=float(mean_balanced[1]),
        is_recipes=is_recipes,
    )


def _max_over_mean(costs: Floats, dealt: Int64s) -> tuple[float, float]:
    """(all phases, vision) of one step; 1 where there is no such cost."""
    loads = costs[dealt].sum(axis=1)
    vision = loads[:, 1:].sum(axis=1)
    return _ratio(loads.sum(axis=1)), _ratio(vision)


def _ratio(loads: Floats) -> float:
    return float(loads.max() / loads.mean()) if loads.any() else 1.0
