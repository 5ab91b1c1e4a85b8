"""Offline packing: best-fit-decreasing over the histogram of lengths. No torch.

Best-fit-decreasing takes samples from the longest to the shortest and puts each into the pack with
the least room that still holds it (a new one where none does). Samples of equal length are alike,
and so are packs with equal room; so all samples of one length are placed together, many packs at
once, which gives the packs of the sample-by-sample rule (Krell et al., 2107.02027). The rooms for
which a pack exists are the bits of one integer, so the best fit is its lowest bit from `length` up.
"""

from __future__ import annotations

import numpy as np

from vlmpack.errors import PackingError
from vlmpack.packing.limits import Integers, Lengths, PackLimits, integers
from vlmpack.packing.two_budgets import place_pairs


def plan_packs(
    lengths: Lengths,
    capacity: int,
    *,
    second: Lengths | None = None,
    second_budget: int | None = None,
    alignment: int = 1,
    max_sequences: int | None = None,
) -> list[Integers]:
    """Choose which samples share a pack, all lengths known. A pure function of its arguments.

    With `second_budget` a sample goes, from the largest share of either budget to the smallest,
    into the pack with the least room in tokens among those with enough room in both.

    Args:
        lengths: (n,) integers, tokens of each sample, at least 1; rounded up to `alignment`.
        capacity: most tokens in a pack.
        second: (n,) integers, at least 0: another quantity of each sample, vision patches say.
        second_budget: most of it in a pack; given with `second`, or both left out.
        alignment: every sample's tokens are rounded up to a multiple of this.
        max_sequences: most samples in a pack.

    Returns:
        One (k,) int64 array a pack: its samples' numbers, ascending. Every sample is in one pack.

    Raises:
        PackingError: an argument that is not as above, or a sample that fits no pack.
    """
    limits = PackLimits(
        capacity=capacity,
        second_budget=second_budget,
        alignment=alignment,
        max_sequences=max_sequences,
    )
    tokens = integers("lengths", lengths, least=1)
    extra = _second(second, limits, len(tokens))
    if len(tokens) == 0:
        return []
    units = -(-tokens // limits.alignment)
    longest = int(units.argmax())
    if units[longest] > limits.units:
        raise limits.too_long(f"lengths[{longest}]", int(tokens[longest]))
    slots = limits.max_sequences or len(tokens)
    if extra is None or not extra.any():
        packs = _place(units, limits.units, slots)
    else:
        packs = place_pairs(units, extra, limits, slots)
    return _members(packs)


def _second(second: Lengths | None, limits: PackLimits, count: int) -> Integers | None:
    if (second is None) != (limits.second_budget is None):
        given, missing = ("second", "second_budget")[:: 1 if second is not None else -1]
        raise PackingError(f"{given} is given without {missing}; give both or neither")
    if second is None or limits.second_budget is None:
        return None
    extra = integers("second", second, least=0)
    if len(extra) != count:
        raise PackingError(f"second has {len(extra)} values, lengths has {count}")
    if count and extra.max() > limits.second_budget:
        largest = int(extra.argmax())
        raise limits.too_much(f"second[{largest}]", int(extra[largest]))
    return extra


def _place(units: Integers, capacity: int, slots: int) -> Integers:
    """(n,) the pack of each sample; packs are numbered in the order in which they are opened."""
    counts = np.bincount(units)
    distinct = np.flatnonzero(counts)[::-1]
    placed = np.array(
        _rounds(distinct.tolist(), counts[distinct].tolist(), capacity, slots), np.int64
    )
    first, number, each = placed.T
    # Packs of one round are consecutive: first, first + 1, ...
    ends = number.cumsum()
    packs = np.arange(ends[-1]) + np.repeat(first - (ends - number), number)
    of_sorted = np.repeat(packs, np.repeat(each, number))
    narrow = (capacity - units).astype(np.uint16 if capacity < 1 << 16 else np.int64)
    found = np.empty_like(of_sorted)
    found[np.argsort(narrow, kind="stable")] = of_sorted
    return found


def _rounds(
    distinct: list[int], counts: list[int], capacity: int, slots: int
) -> list[tuple[int, int, int]]:
    """Best-fit-decreasing as rounds (first pack, number of packs, samples into each).

    Args:
        distinct: lengths, descending.
        counts: samples of each length.
        capacity: room of an empty pack.
        slots: samples that an empty pack may take.
    """
    rounds: list[tuple[int, int, int]] = []
    groups: dict[int, list[tuple[int, int, int]]] = {}  # room -> (first, stop, slots left)
    rooms = opened = 0  # bit r of rooms: groups[r] is not empty
    shortest = distinct[-1]
    for length, count in zip(distinct, counts, strict=True):
        while count:
            above = rooms >> length
            if above:
                room = length + (above & -above).bit_length() - 1
                same = groups[room]
                first, stop, free = same.pop()
            else:
                room, free, first = capacity, slots, opened
                stop = opened + count
                same = []
            each = min(room // length, free, count)
            number = min(stop - first, count // each)
            rounds.append((first, number, each))
            count -= number * each
            if not above:
                opened += number
            elif first + number < stop:
                same.append((first + number, stop, free))
            elif not same:
                rooms ^= 1 << room
            left = room - each * length
            if left >= shortest and free > each:
                groups.setdefault(left, []).append((first, first + number, free - each))
                rooms |= 1 << left
    return rounds


def _members(packs: Integers) -> list[Integers]:
    """Samples of each pack, ascending."""
    count = len(packs)
    order = np.sort(packs * count + np.arange(count)) % count
    stops = np.bincount(packs).cumsum().tolist()
    return [order[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
