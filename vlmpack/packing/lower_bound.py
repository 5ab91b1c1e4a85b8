"""How few packs there can be at all: a plan with that many needs no second look. No torch."""

from __future__ import annotations

import numpy as np

from vlmpack.packing.limits import Integers, PackLimits

EXACT_IN_FLOAT = 1 << 53
"""Sums below it are exact in float64, which is what `np.bincount` adds in."""

COUNTED = 1 << 22
"""Largest pack whose sizes are counted one by one."""


def fewest_packs(units: Integers, second: Integers | None, limits: PackLimits) -> int:
    """A number of packs that no plan falls short of.

    Args:
        units: (n,) lengths in units of the alignment, n at least 1.
        second: (n,) the second quantity; None for no bound on it.
        limits: bounds of a pack.
    """
    least = _fewest(units, limits.units)
    if second is not None:
        assert limits.second_budget is not None
        least = max(least, _fewest(second, limits.second_budget))
    if limits.max_sequences is not None:
        least = max(least, -(-len(units) // limits.max_sequences))
    return least


def _fewest(sizes: Integers, capacity: int) -> int:
    """By the sum of sizes and, where some are larger than half a pack, by what fits beside them.

    For every t up to half a pack: what is larger than capacity - t lies alone, what is larger than
    half a pack beside nothing of its kind; and the sizes from t to a half that do not fit into the
    room that these leave take packs of their own (L2 of Martello and Toth).
    """
    total = exact_sum(sizes)
    least = -(-total // capacity)
    if 2 * int(sizes.max()) <= capacity or capacity > COUNTED:
        return least
    counts = np.bincount(sizes, minlength=capacity + 1)
    count = np.concatenate(([0], counts.cumsum()))  # of sizes below t, at place t
    mass = np.concatenate(([0], (counts * np.arange(len(counts))).cumsum()))
    half = capacity // 2 + 1  # the first size of which no two share a pack
    t = np.arange(1, half)
    above = capacity - t + 1  # the first size that lies alone beside those from t on
    beside = (count[above] - count[half]) * capacity - (mass[above] - mass[half])
    over = -(-(mass[half] - mass[t] - beside) // capacity)
    return max(least, int(count[-1] - count[half] + over.max(initial=0)))


def exact_sum(values: Integers) -> int:
    """The sum of values that an int64 may not hold the sum of."""
    if float(values.sum(dtype=np.float64)) < EXACT_IN_FLOAT:
        return int(values.sum())
    return sum(values.tolist())


def sums_by_pack(packs: Integers, values: Integers) -> Integers:
    """(packs,) the sum of the values in each pack; every pack is used.

    Args:
        packs: (n,) the pack of each sample.
        values: (n,) at least 0; an int64 holds the sum in each pack.
    """
    if float(values.sum(dtype=np.float64)) < EXACT_IN_FLOAT:
        return np.bincount(packs, weights=values).astype(np.int64)
    sums = np.zeros(int(packs.max()) + 1, np.int64)
    np.add.at(sums, packs, values)
    return sums
