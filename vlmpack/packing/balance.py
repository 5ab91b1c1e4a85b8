"""Deal the packs of one global batch to ranks so that the ranks finish together. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vlmpack.errors import PackingError
from vlmpack.packing.limits import Integers, positive

Floats = npt.NDArray[np.float64]


def balance(
    costs: npt.ArrayLike, num_ranks: int, *, tolerance: float = 0.01, max_swaps: int = 256
) -> Integers:
    """Deal n items to ranks, equally many to each, so that the largest load is small.

    Every cost component of a rank is measured in shares of its mean over ranks; what is made small
    is the largest share of any rank and component. Longest first: an item goes to the rank, of
    those with room, whose largest share stays smallest. Then items of the worst rank are swapped
    with others while that helps. A pure function of its arguments.

    Args:
        costs: (n,) or (n, k), finite and at least 0: k costs of each item, in any units.
        num_ranks: n must be a multiple of it; fill with items of no cost.
        tolerance: swapping ends once no load is more than this share above its mean.
        max_swaps: most swaps.

    Returns:
        (num_ranks, n / num_ranks) int64: the items of each rank, ascending.

    Raises:
        PackingError: an argument that is not as above.
    """
    table = _checked(costs)
    ranks = positive("num_ranks", num_ranks)
    count = len(table)
    if count % ranks:
        raise PackingError(
            f"costs has {count} items, not a multiple of num_ranks {ranks}; add "
            f"{-count % ranks} items of no cost"
        )
    if count == 0:
        return np.zeros((ranks, 0), np.int64)
    totals = table.sum(axis=0)
    shares = table * np.divide(ranks, totals, out=np.zeros_like(totals), where=totals > 0)
    dealt = _deal(shares, ranks)
    if ranks > 1:
        _swap(shares, dealt, 1 + tolerance, max_swaps)
    return np.sort(dealt, axis=1)


def _checked(costs: npt.ArrayLike) -> Floats:
    """(n, k)."""
    table: npt.NDArray[Any] = np.asarray(costs)
    if table.ndim not in (1, 2) or table.dtype.kind not in "iuf":
        raise PackingError(
            f"costs must be numbers of shape (n,) or (n, k), found {table.dtype} of shape "
            f"{table.shape}"
        )
    table = table.astype(np.float64)
    table = table[:, None] if table.ndim == 1 else table
    bad = ~(np.isfinite(table) & (table >= 0)).all(axis=1)
    if bad.any():
        first = int(bad.argmax())
        raise PackingError(f"costs[{first}] is {table[first].tolist()}, expected finite, >= 0")
    return table


def _deal(shares: Floats, ranks: int) -> Integers:
    """(R, n / R) items, longest first."""
    each = len(shares) // ranks
    dealt = np.zeros((ranks, each), np.int64)
    filled = np.zeros(ranks, np.int64)
    loads = np.zeros((ranks, shares.shape[1]))
    for item in np.argsort(-shares.sum(axis=1), kind="stable").tolist():
        after = (loads + shares[item]).max(axis=1)
        after[filled == each] = np.inf
        rank = int(after.argmin())
        dealt[rank, filled[rank]] = item
        filled[rank] += 1
        loads[rank] += shares[item]
    return dealt


def _swap(shares: Floats, dealt: Integers, goal: float, max_swaps: int) -> None:
    """Swap an item of the worst rank with one of another while the larger of the two falls."""
    loads = shares[dealt].sum(axis=1)
    for _ in range(max_swaps):
        worst = int(loads.max(axis=1).argmax())
        if loads[worst].max() <= goal:
            return
        mine, theirs = shares[dealt[worst]], shares[dealt]
        moved = theirs[None] - mine[:, None, None]  # (m, R, m, k): what the worst rank gains
        pair = np.maximum(
            (loads[worst] + moved).max(axis=-1), (loads[:, None] - moved).max(axis=-1)
        )
        pair[:, worst] = np.inf
        i, rank, j = np.unravel_index(int(pair.argmin()), pair.shape)
        if pair[i, rank, j] >= loads[worst].max() * (1 - 1e-9):
            return
        change = moved[i, rank, j].copy()
        loads[worst] += change
        loads[rank] -= change
        dealt[worst, i], dealt[rank, j] = dealt[rank, j], dealt[worst, i]
