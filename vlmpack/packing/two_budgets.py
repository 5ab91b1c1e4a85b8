"""Offline packing under two budgets: tokens and another quantity. No torch.

Samples with the same (tokens, second) are placed together. Packs are kept by their room in tokens;
a tree over the rooms holds the largest room in the second quantity of each, so the best fit in
tokens among the packs with enough of both is found in log(capacity) steps.
"""

from __future__ import annotations

from bisect import insort

import numpy as np

from vlmpack.errors import PackingError
from vlmpack.packing.limits import Integers, PackLimits


def place_pairs(units: Integers, second: Integers, limits: PackLimits, slots: int) -> Integers:
    """(n,) the pack of each sample, under both budgets.

    Args:
        units: (n,) tokens of each sample in units of the alignment, at most `limits.units`.
        second: (n,) the other quantity, at most `limits.second_budget`.
        limits: bounds of a pack.
        slots: most samples in a pack.

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
    placed = [
        packs.place(*group)
        for group in zip(
            tokens[order].tolist(), extra[order].tolist(), counts[order].tolist(), strict=True
        )
    ]
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    found = np.empty(len(units), np.int64)
    found[np.argsort(rank[group_of], kind="stable")] = np.concatenate(placed)
    return found


def countable_budget(second: Integers, limits: PackLimits) -> int:
    """The bound to count with: no more than there is of it, where products would be too large.

    Args:
        second: (n,) the quantity that `limits.second_budget` bounds.
        limits: bounds of a pack.

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
            f"second_budget is {limits.second_budget} and second adds up to at least {budget}; "
            f"with a capacity of {limits.capacity} at most {most} can be counted; give second and "
            "second_budget in larger units"
        )
    return budget


class _Packs:
    """Packs that may take more, by their room in tokens.

    Args:
        capacity: tokens of an empty pack.
        budget: second quantity of an empty pack.
        slots: samples of an empty pack.
    """

    def __init__(self, capacity: int, budget: int, slots: int) -> None:
        self._capacity, self._budget, self._slots = capacity, budget, slots
        self._opened = 0
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
                group = (self._budget, self._slots, self._opened, self._opened + count)
            else:
                group = self._pop(room, second)
            free, slots, first, stop = group
            each = min(room // tokens, slots, count, free // second if second else count)
            number = min(stop - first, count // each)
            count -= number * each
            into.append(np.repeat(np.arange(first, first + number), each))
            if first == self._opened:
                self._opened += number
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
