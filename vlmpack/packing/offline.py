"""Offline packing: which samples share a pack, all lengths known. No torch.

Lengths -> best-fit-decreasing (histogram.py) -> where that leaves packs to save, or some over the
second budget, these and the emptiest are taken apart and packed anew by exact subset sums
(stream.py) -> where there may still be fewer packs (lower_bound.py), all samples by
best-fit-decreasing under both budgets (two_budgets.py) and by exact subset sums in their own order,
and the fewest packs are taken -> sample numbers.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

import numpy as np

from vlmpack.errors import PackingError
from vlmpack.packing.histogram import place_lengths
from vlmpack.packing.limits import Bools, Integers, Lengths, PackLimits, integers
from vlmpack.packing.lower_bound import exact_sum, fewest_packs, sums_by_pack
from vlmpack.packing.stream import BUFFER_SIZE, StreamPacker, buffer_for
from vlmpack.packing.two_budgets import countable_budget, place_pairs

REPACKED_SAMPLES = 80_000
"""Most samples that are packed anew after best-fit-decreasing: 0.2 to 0.4 s."""

MAX_UNITS = 1 << 24
"""The most multiples of the alignment in a pack."""


def plan_packs(
    lengths: Lengths,
    capacity: int,
    *,
    second: Lengths | None = None,
    second_budget: int | None = None,
    alignment: int = 1,
    max_sequences: int | None = None,
) -> list[Integers]:
    """Choose which samples share a pack. A pure function of its arguments.

    Never more packs than best-fit-decreasing (under two budgets: each sample, from the largest
    share of either budget to the smallest, into the pack with the least room in tokens among those
    with enough of both) or `StreamPacker` makes of the samples as they come. Where
    best-fit-decreasing takes as few packs as there can be, nothing else is tried; where it does
    not, all samples may be packed again, at 0.1 to 0.5 million samples/s. Of samples so short that
    `StreamPacker` needs a larger buffer (`buffer_for`), 1% more packs than that are as good.

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
    longest = int(tokens.argmax())
    units = -(-tokens // limits.alignment)
    if units[longest] > limits.units:
        raise limits.too_long(f"lengths[{longest}]", int(tokens[longest]))
    if limits.units > MAX_UNITS:
        limits = replace(limits, capacity=limits.alignment * _countable(units, limits))
    if extra is not None and extra.any():
        limits = replace(limits, second_budget=countable_budget(extra, limits))
    else:
        extra = None
    return _members(_fewest(units, extra, limits))


def _countable(units: Integers, limits: PackLimits) -> int:
    """Units of a pack, not more than all samples have: rooms are counted one by one.

    Raises:
        PackingError: they are too many.
    """
    most = min(limits.units, exact_sum(units))
    if most > MAX_UNITS:
        raise PackingError(
            f"capacity {limits.capacity} at alignment {limits.alignment} is {most:,} units, and at "
            f"most {MAX_UNITS:,} are planned; raise alignment, and give lengths in tokens"
        )
    return most


def _second(second: Lengths | None, limits: PackLimits, count: int) -> Integers | None:
    budget = limits.second_budget
    if second is None and budget is None:
        return None
    if second is None or budget is None:
        given, missing = ("second_budget", "second") if second is None else ("second", "its budget")
        raise PackingError(f"{given} is given without {missing}; give both or neither")
    extra = integers("second", second, least=0)
    if len(extra) != count:
        raise PackingError(f"second has {len(extra)} values, expected {count} as in lengths")
    if count and extra.max() > budget:
        largest = int(extra.argmax())
        raise limits.too_much(f"second[{largest}]", int(extra[largest]))
    return extra


def _fewest(units: Integers, extra: Integers | None, limits: PackLimits) -> Integers:
    """(n,) the pack of each sample, by the first way that takes as few packs as there can be, or by
    the one that takes fewest.

    Args:
        units: (n,) lengths.
        extra: (n,) the second quantity; None where there is none.
        limits: bounds of a pack.
    """
    least, waiting = fewest_packs(units, extra, limits), buffer_for(units, limits.units)
    if waiting > BUFFER_SIZE:
        least += least // 100  # a look at a million short samples costs ten times the plan
    slots = limits.max_sequences or len(units)
    packs = place_lengths(units, limits.units, slots)
    best = _repacked(units, extra, packs, limits, least, waiting)
    if best is not None and _count(best) <= least:
        return best
    if extra is not None:
        pairs = place_pairs(units, extra, limits, slots)
        if best is None or _count(pairs) < _count(best):
            best = pairs
    assert best is not None
    if _count(best) <= least:
        return best
    streamed = _streamed(units, extra, limits, most=_count(best) - 1, waiting=waiting)
    return best if streamed is None else streamed


def _repacked(
    units: Integers,
    extra: Integers | None,
    packs: Integers,
    limits: PackLimits,
    least: int,
    waiting: int,
) -> Integers | None:
    """(n,) packs within both budgets: those over the second one are packed anew, and the emptiest
    with them where that saves packs. None where too many are over.

    Args:
        units: (n,) lengths.
        extra: (n,) the second quantity.
        packs: (n,) the pack of each sample within all bounds but the second budget; each is used.
        limits: bounds of a pack.
        least: how few packs there can be.
        waiting: samples that the second packer holds.
    """
    taken = _count(packs)
    excess = taken - least
    apart = np.zeros(taken, bool)
    if extra is not None:
        apart = _relieved(sums_by_pack(packs, extra), limits)
    over = bool(apart.any())
    if not over and excess <= 0:
        return packs
    used, sizes = sums_by_pack(packs, units), np.bincount(packs)
    if over and sizes[apart].sum() > min(REPACKED_SAMPLES, len(units) // 4):
        return None
    if limits.max_sequences is not None and excess > least // 100:
        # Packs that the bound ended, and as many of the fewest samples to share theirs with.
        ended = np.count_nonzero(sizes == limits.max_sequences)
        count = taken if waiting == BUFFER_SIZE else ended
        order = np.argsort(sizes, kind="stable")
        apart[order[:count]] = apart[order[taken - count :]] = True
    else:
        rooms = np.where(apart, 0, limits.units - used)
        apart[_emptiest(rooms, sizes, (excess + 0.5) * limits.units, waiting)] = True
    # Mixed, since neighbours in the order of the samples may be alike.
    samples = np.random.default_rng(0).permutation(np.flatnonzero(apart[packs]))
    num_apart = int(np.count_nonzero(apart))
    anew = _streamed(
        units[samples],
        None if extra is None else extra[samples],
        limits,
        most=len(samples) if over else num_apart - 1,
        waiting=waiting,
    )
    if anew is None:
        return packs
    found = ((~apart).cumsum() - 1)[packs]
    found[samples] = taken - num_apart + anew
    return found


def _relieved(second: Integers, limits: PackLimits) -> Bools:
    """(packs,) bool: those over the second budget and, for each, one of those with the least of it,
    so that together they have room.

    Args:
        second: (packs,) the sum in each.
        limits: bounds of a pack.
    """
    assert limits.second_budget is not None
    over = second > limits.second_budget
    count = min(np.count_nonzero(over), np.count_nonzero(~over))
    if count:
        over[np.argsort(second, kind="stable")[:count]] = True
    return over


def _emptiest(rooms: Integers, sizes: Integers, room: float, waiting: int) -> Integers:
    """Packs with the most room, as many as have `room` together.

    Packs of very many samples, but for the emptiest, are left alone: a choice among `waiting`
    samples of theirs fills no pack.

    Args:
        rooms: (packs,) what each may still take.
        sizes: (packs,) samples in each.
        room: the sum of rooms wanted.
        waiting: samples that a new pack is chosen from.
    """
    rooms = np.where((sizes > 2 * waiting) & (rooms < rooms.max()), 0, rooms)
    order = np.argsort(-rooms, kind="stable")[: np.count_nonzero(rooms)]
    enough = int(np.searchsorted(rooms[order].cumsum(), room)) + 1
    few = int(np.searchsorted(sizes[order].cumsum(), REPACKED_SAMPLES))
    return order[: min(enough, few)]


def _streamed(
    units: Integers,
    extra: Integers | None,
    limits: PackLimits,
    *,
    most: int,
    waiting: int,
) -> Integers | None:
    """(n,) the pack of each sample as they come; None, as soon as it is certain, for more than
    `most` packs.

    Args:
        units: (n,) lengths.
        extra: (n,) the second quantity.
        limits: bounds of a pack.
        most: packs.
        waiting: samples that a pack is chosen from.
    """
    packer = StreamPacker(
        limits.units,
        buffer_size=waiting,
        second_budget=None if extra is None else limits.second_budget,
        max_sequences=limits.max_sequences,
    )
    lengths = units.tolist()
    others = repeat(0) if extra is None else extra.tolist()
    spare = most * limits.units - sum(lengths)
    samples: list[int] = []  # of all packs in one list: many small ones keep the collector busy
    sizes: list[int] = []
    for pack in packer.packs(lengths, others):
        samples += pack
        sizes.append(len(pack))
        spare -= limits.units - sum(map(lengths.__getitem__, pack))
        if spare < 0:
            return None
    for pack in packer.flush():
        samples += pack
        sizes.append(len(pack))
    if len(sizes) > most:
        return None
    found = np.empty(len(units), np.int64)
    found[samples] = np.repeat(np.arange(len(sizes)), sizes)
    return found


def _count(packs: Integers) -> int:
    """The number of packs, all of which are used."""
    return int(packs.max()) + 1


def _members(packs: Integers) -> list[Integers]:
    """Samples of each pack, ascending."""
    count = len(packs)
    order = np.sort(packs * count + np.arange(count)) % count
    stops = np.bincount(packs).cumsum().tolist()
    return [order[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
