"""Offline packing: which samples share a pack, all lengths known. No torch.

Lengths -> best-fit-decreasing (histogram.py, two_budgets.py) -> where that leaves packs to save,
the emptiest packs are taken apart and packed anew by exact subset sums (stream.py) -> sample
numbers.
"""

from __future__ import annotations

import numpy as np

from vlmpack.errors import PackingError
from vlmpack.packing.histogram import place_lengths
from vlmpack.packing.limits import Integers, Lengths, PackLimits, integers
from vlmpack.packing.stream import StreamPacker
from vlmpack.packing.two_budgets import place_pairs

REPACKED_SAMPLES = 80_000
"""Most samples that are packed anew after best-fit-decreasing: 0.2 to 0.4 s."""

BUFFER_SIZE = 64
"""Samples that the second packer chooses from."""


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

    Without a second budget: best-fit-decreasing; if it opens more than one pack above the lower
    bound, its emptiest packs are packed anew where that saves packs (all of them, at some 0.2
    million samples/s, if `max_sequences` costs more than 1% of the packs). With a second budget a
    sample goes, from the largest share of either budget to the smallest, into the pack with the
    least room in tokens among those with enough room of both.

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
    slots = limits.max_sequences or len(tokens)
    if extra is not None and extra.any():
        return _members(place_pairs(units, extra, limits, slots))
    return _members(_repacked(units, place_lengths(units, limits.units, slots), limits))


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


def _repacked(units: Integers, packs: Integers, limits: PackLimits) -> Integers:
    """(n,) packs, fewer where packing the emptiest ones anew saves some.

    Args:
        units: (n,) lengths.
        packs: (n,) the pack of each sample, every pack used.
        limits: bounds of a pack.
    """
    used = np.bincount(packs, weights=units).astype(np.int64)
    sizes = np.bincount(packs)
    least = -(-int(units.sum()) // limits.units)
    if limits.max_sequences is not None:
        least = max(least, -(-len(units) // limits.max_sequences))
    excess = len(used) - least
    if excess <= 1:
        return packs
    if limits.max_sequences is not None and excess > least // 100:
        taken = np.arange(len(used))
    else:
        taken = _emptiest(limits.units - used, sizes, (excess + 0.5) * limits.units)
    apart = np.zeros(len(used), bool)
    apart[taken] = True
    # Mixed, since neighbours in the order of the samples may be alike.
    samples = np.random.default_rng(0).permutation(np.flatnonzero(apart[packs]))
    anew = _streamed(units[samples].tolist(), limits)
    if len(anew) >= len(taken):
        return packs
    found = ((~apart).cumsum() - 1)[packs]
    for number, pack in enumerate(anew, start=len(used) - len(taken)):
        found[samples[pack]] = number
    return found


def _emptiest(rooms: Integers, sizes: Integers, room: float) -> Integers:
    """Packs with the most room, as many as have `room` together.

    Packs of very many samples, but for the emptiest, are left alone: a choice among `BUFFER_SIZE`
    samples of theirs fills no pack.

    Args:
        rooms: (packs,) what each may still take.
        sizes: (packs,) samples in each.
        room: the sum of rooms wanted.
    """
    rooms = np.where((sizes > 2 * BUFFER_SIZE) & (rooms < rooms.max()), 0, rooms)
    order = np.argsort(-rooms, kind="stable")[: np.count_nonzero(rooms)]
    enough = int(np.searchsorted(rooms[order].cumsum(), room)) + 1
    few = int(np.searchsorted(sizes[order].cumsum(), REPACKED_SAMPLES))
    return order[: min(enough, few)]


def _streamed(units: list[int], limits: PackLimits) -> list[list[int]]:
    packer = StreamPacker(limits.units, buffer_size=BUFFER_SIZE, max_sequences=limits.max_sequences)
    packs = [pack for length in units for pack in packer.push(length)]
    return packs + packer.flush()


def _members(packs: Integers) -> list[Integers]:
    """Samples of each pack, ascending."""
    count = len(packs)
    order = np.sort(packs * count + np.arange(count)) % count
    stops = np.bincount(packs).cumsum().tolist()
    return [order[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
