"""Offline packing: which samples share a pack, all lengths known. No torch.

`plan_packs` works in three steps and takes the fewest packs that it finds:

1. Best-fit-decreasing by tokens.
2. Packs over the second budget, and the emptiest where packs can be saved, are taken apart and
   packed anew by exact subset sums (`stream.py`).
3. Where fewer packs may still be possible (`limits.fewest_packs`): all samples by
   best-fit-decreasing under both budgets, and by exact subset sums in their own order.

Best-fit-decreasing takes samples from the longest to the shortest. Each goes into the fullest pack
that still has room for it, or into a new one. Samples of equal length are alike, and so are packs
with equal room, so all samples of one length are placed together. That gives the packs of the
sample-by-sample rule (Krell et al., 2107.02027). The rooms for which a pack exists are the bits of
one integer, so the best fit is its lowest bit from `length` up.

Under two budgets, samples with the same (tokens, second) are placed together. Packs are kept by
their room in tokens. A tree over the rooms holds the largest room in the second quantity of each,
so the best fit in tokens with enough of both is found in log(capacity) steps.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from itertools import repeat

import numpy as np

from vlmpack.errors import PackingError
from vlmpack.packing.limits import (
    Bools,
    Integers,
    Lengths,
    PackLimits,
    exact_sum,
    fewest_packs,
    integers,
    sums_by_pack,
)
from vlmpack.packing.stream import BUFFER_SIZE, StreamPacker, buffer_for


def place_lengths(units: Integers, capacity: int, slots: int) -> Integers:
    """(n,) the pack of each sample; packs are numbered in the order in which they are opened.

    Args:
        units: (n,) lengths, at least 1 and at most `capacity`; n at least 1.
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
    placement = np.empty_like(units)
    placement[np.argsort(keys, kind="stable")] = np.repeat(packs, np.repeat(each, number))
    return placement


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
    rooms = num_packs = 0  # bit r of rooms: groups[r] is not empty
    shortest = distinct[-1]
    for length, count in zip(distinct, counts, strict=True):
        while count:
            above = rooms >> length
            if above:
                room = length + (above & -above).bit_length() - 1
                same = groups[room]
                first, stop, free = same.pop()
            else:
                room, free, first = capacity, slots, num_packs
                stop = num_packs + count
                same = []
            each = min(room // length, free, count)
            number = min(stop - first, count // each)
            rounds.append((first, number, each))
            count -= number * each
            if not above:
                num_packs += number
            elif first + number < stop:
                same.append((first + number, stop, free))
            elif not same:
                rooms ^= 1 << room
            room_left = room - each * length
            if room_left >= shortest and free > each:
                groups.setdefault(room_left, []).append((first, first + number, free - each))
                rooms |= 1 << room_left
    return rounds


def place_pairs(units: Integers, second: Integers, limits: PackLimits, slots: int) -> Integers:
    """(n,) the pack of each sample, under both budgets.

    Args:
        units: (n,) tokens of each sample in units of the alignment, at most `limits.units`.
        second: (n,) the other quantity, at most `limits.second_budget`.

    Raises:
        PackingError: numbers so large that an int64 does not hold their products.
    """
    budget = countable_budget(second, limits)
    pairs, group_of, counts = np.unique(
        units * (budget + 1) + second, return_inverse=True, return_counts=True
    )
    tokens, extra = np.divmod(pairs, budget + 1)
    # Compared as integers: tokens / units against second / budget.
    share = np.maximum(tokens * budget, extra * limits.units)
    order = np.lexsort((extra, tokens, share))[::-1]
    packs = _Packs(limits.units, budget, slots)
    packed = [
        packs.place(*group)
        for group in zip(
            tokens[order].tolist(), extra[order].tolist(), counts[order].tolist(), strict=True
        )
    ]
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    pack_of = np.empty(len(units), np.int64)
    pack_of[np.argsort(rank[group_of], kind="stable")] = np.concatenate(packed)
    return pack_of


def countable_budget(second: Integers, limits: PackLimits) -> int:
    """The second budget, reduced to the total of the quantity where products would overflow.

    Raises:
        PackingError: numbers so large that an int64 does not hold their products.
    """
    budget = limits.second_budget
    assert budget is not None
    most = int(np.iinfo(np.int64).max) // (limits.units + 1) - 1
    if budget > most:
        budget = min(budget, sum(second.tolist()))
    if budget > most:
        raise PackingError(
            f"second_budget is {limits.second_budget} and second adds up to at least {budget}. "
            f"With a capacity of {limits.capacity} at most {most} can be counted. Give second and "
            "second_budget in larger units"
        )
    return budget


class _Packs:
    """Packs that may take more, by their room in tokens."""

    def __init__(self, capacity: int, budget: int, slots: int) -> None:
        self._capacity, self._budget, self._slots = capacity, budget, slots
        self._num_packs = 0
        self._groups: dict[int, list[tuple[int, int, int, int]]] = {}
        """Room in tokens -> (room in second, slots left, first pack, stop), ascending."""
        self._leaves = 1 << capacity.bit_length()
        self._most = [-1] * (2 * self._leaves)
        """A binary tree: the largest room in second below each node; -1 for none."""

    def place(self, tokens: int, second: int, count: int) -> Integers:
        """(count,) packs of `count` equal samples."""
        into: list[Integers] = []
        while count:
            room = self._best(tokens, second)
            if room is None:
                room = self._capacity
                group = (self._budget, self._slots, self._num_packs, self._num_packs + count)
            else:
                group = self._pop(room, second)
            free, slots, first, stop = group
            each = min(room // tokens, slots, count, free // second if second else count)
            number = min(stop - first, count // each)
            count -= number * each
            into.append(np.repeat(np.arange(first, first + number), each))
            if first == self._num_packs:
                self._num_packs += number
            else:
                self._push(room, (free, slots, first + number, stop))
            self._push(
                room - each * tokens,
                (free - each * second, slots - each, first, first + number),
            )
        return np.concatenate(into)

    def _best(self, tokens: int, second: int) -> int | None:
        """The least room of at least `tokens` for which a pack has `second` left."""
        most = self._most
        node = self._leaves + tokens
        while most[node] < second:
            while node & 1:  # a right child: what lies to the right of its parent comes next
                node >>= 1
            if node == 0:
                return None
            node += 1
        while node < self._leaves:
            node *= 2
            if most[node] < second:
                node += 1
        return node - self._leaves

    def _pop(self, room: int, second: int) -> tuple[int, int, int, int]:
        """The packs of that room with the least of the second quantity that suffices."""
        groups = self._groups[room]
        place = next(i for i, group in enumerate(groups) if group[0] >= second)
        group = groups.pop(place)
        self._update(room)
        return group

    def _push(self, room: int, group: tuple[int, int, int, int]) -> None:
        if room > 0 and group[1] > 0 and group[2] < group[3]:
            insort(self._groups.setdefault(room, []), group)
            self._update(room)

    def _update(self, room: int) -> None:
        groups = self._groups[room]
        most, node = self._most, self._leaves + room
        most[node] = groups[-1][0] if groups else -1
        node >>= 1
        while node:
            most[node] = max(most[2 * node], most[2 * node + 1])
            node >>= 1


REPACKED_SAMPLES = 80_000
"""Most samples that are packed again after best-fit-decreasing: 0.2 to 0.4 s."""

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

    There are never more packs than best-fit-decreasing or `StreamPacker` makes of the samples in
    order. Under two budgets, best-fit-decreasing takes samples from the largest share of either
    budget to the smallest. Each goes into the pack with the least room in tokens among those with
    enough of both.

    Where best-fit-decreasing reaches the lower bound, nothing else is tried. Otherwise all samples
    may be packed again, at 0.1 to 0.5 million samples/s. For samples so short that `StreamPacker`
    needs a larger buffer (`buffer_for`), 1% more packs than the lower bound are accepted.

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
    """Units of a pack, at most the total of all samples, because rooms are counted one by one.

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
    """(n,) the pack of each sample, by the first method that reaches the lower bound, or else the
    best one.

    Args:
        extra: (n,) the second quantity; None where there is none.
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
    """(n,) packs within both budgets, or None where too many exceed the second one.

    Packs over the second budget are packed again, with the emptiest where that saves packs.

    Args:
        extra: (n,) the second quantity.
        packs: (n,) the pack of each sample within all bounds but the second budget; each is used.
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
    repacked = ((~apart).cumsum() - 1)[packs]
    repacked[samples] = taken - num_apart + anew
    return repacked


def _relieved(second: Integers, limits: PackLimits) -> Bools:
    """(packs,) bool: packs over the second budget, with as many of those that have the least of it.

    Together they have room.

    Args:
        second: (packs,) the sum in each.
    """
    assert limits.second_budget is not None
    over = second > limits.second_budget
    count = min(np.count_nonzero(over), np.count_nonzero(~over))
    if count:
        over[np.argsort(second, kind="stable")[:count]] = True
    return over


def _emptiest(rooms: Integers, sizes: Integers, room: float, waiting: int) -> Integers:
    """The packs with the most room, as many as have `room` together.

    Packs of very many samples are left alone, except the emptiest. A choice among `waiting` of
    their samples fills no pack.

    Args:
        rooms: (packs,) what each may still take.
        sizes: (packs,) samples in each.
        room: the sum of rooms wanted.
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
    """(n,) the pack of each sample in stream order; None if more than `most` packs are certain."""
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
    streamed = np.empty(len(units), np.int64)
    streamed[samples] = np.repeat(np.arange(len(sizes)), sizes)
    return streamed


def _count(packs: Integers) -> int:
    """The number of packs, all of which are used."""
    return int(packs.max()) + 1


def _members(packs: Integers) -> list[Integers]:
    """Samples of each pack, ascending."""
    count = len(packs)
    order = np.sort(packs * count + np.arange(count)) % count
    stops = np.bincount(packs).cumsum().tolist()
    return [order[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
