"""Offline packing: best-fit-decreasing over the histogram of lengths. No torch.

Best-fit-decreasing takes samples from the longest to the shortest and puts each into the pack with
the least room that still holds it (a new one where none does). Samples of equal length are alike,
and so are packs with equal room; so all samples of one length are placed together, many packs at
once, which gives the packs of the sample-by-sample rule (Krell et al., 2107.02027). The rooms for
which a pack exists are the bits of one integer, so the best fit is its lowest bit from `length` up.
"""

from __future__ import annotations

import numpy as np

from vlmpack.packing.limits import Integers


def place_lengths(units: Integers, capacity: int, slots: int) -> Integers:
    """(n,) the pack of each sample; packs are numbered in the order in which they are opened.

    Args:
        units: (n,) lengths, at least 1 and at most `capacity`; n at least 1.
        capacity: most of their sum in a pack.
        slots: most samples in a pack.
    """
    counts = np.bincount(units)
    distinct = np.flatnonzero(counts)[::-1]
    rounds = best_fit_decreasing(distinct.tolist(), counts[distinct].tolist(), capacity, slots)
    first, number, each = np.array(rounds, np.int64).T
    # Packs of one round are consecutive: first, first + 1, ...
    ends = number.cumsum()
    packs = np.arange(ends[-1]) + np.repeat(first - (ends - number), number)
    # 16-bit keys are sorted by radix, several times faster.
    keys = (capacity - units).astype(np.uint16 if capacity < 1 << 16 else np.int64)
    found = np.empty_like(units)
    found[np.argsort(keys, kind="stable")] = np.repeat(packs, np.repeat(each, number))
    return found


def best_fit_decreasing(
    distinct: list[int], counts: list[int], capacity: int, slots: int
) -> list[tuple[int, int, int]]:
    """Best-fit-decreasing in rounds: (first pack, number of packs, samples into each of them).

    Args:
        distinct: lengths, descending.
        counts: samples of each length.
        capacity: room of an empty pack.
        slots: samples that an empty pack may take.

    Returns:
        Rounds of equal samples, in the order of `distinct`; packs are numbered as they are opened.
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
