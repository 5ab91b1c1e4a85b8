"""Online packing: full packs from a stream of lengths, with a small buffer. No torch.

The packer holds up to `buffer_size` samples, by their lengths alone. When the buffer is full it
makes one pack. The pack contains the oldest sample, and an exact subset sum chooses the rest, so it
is as full as any pack with the oldest. The reachable sums are the bits of one integer, kept as the
room they leave. Bit r of `rooms` says that some choice leaves room r, and `rooms |= rooms >>
length` offers one more sample. Samples are offered from the oldest on, and the search ends at the
first choice that leaves no room. So among full packs it takes an old one.

A pack of many short samples needs a larger buffer (`buffer_for`), but the choice is still among
`BUFFER_SIZE` samples. The oldest are taken in order until the rest of a bound is at most half of
what the next `BUFFER_SIZE` samples hold of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from operator import index

from vlmpack.errors import PackingError
from vlmpack.packing.limits import Integers, PackLimits, exact_sum, positive

BUFFER_SIZE = 64
"""Samples that the last ones of a pack are chosen from, and the least that wait."""

MAX_BUFFER_SIZE = 8192
"""The most samples that `buffer_for` lets wait."""


def buffer_for(units: Integers, capacity: int) -> int:
    """How many samples the buffer holds. As many as fill two packs, between `BUFFER_SIZE` and
    `MAX_BUFFER_SIZE`.

    Args:
        units: (n,) lengths of all samples of a window.
        capacity: most of their sum in a pack.
    """
    samples = -(-2 * capacity * len(units) // max(1, exact_sum(units)))
    return max(BUFFER_SIZE, min(samples, MAX_BUFFER_SIZE))


class StreamPacker:
    """Packs in stream order, nearly full. A pure function of what was pushed.

    A sample waits for at most `buffer_size` packs, because every pack takes the oldest waiting
    sample.

    No pack exceeds a bound. A pack is as full as any that holds the oldest sample and others of the
    buffer, under two conditions. At most `BUFFER_SIZE` samples wait, and the fullest choice obeys
    `second_budget` and `max_sequences`. Where more samples wait, this holds for the chosen part of
    a pack. Where the fullest choice breaks one of the two bounds, the packer uses a heuristic. It
    sets aside the chosen samples that cost most of the broken bound until the next pack, and
    chooses again.

    Args:
        capacity: most tokens in a pack.
        buffer_size: samples that may wait; at least 1.
        second_budget: most of a second quantity (vision patches, say) in a pack.
        alignment: every length is rounded up to a multiple of this.
        max_sequences: most samples in a pack.

    Raises:
        PackingError: an argument that is not a positive integer.
    """

    def __init__(
        self,
        capacity: int,
        *,
        buffer_size: int = BUFFER_SIZE,
        second_budget: int | None = None,
        alignment: int = 1,
        max_sequences: int | None = None,
    ) -> None:
        self._limits = PackLimits(
            capacity=capacity,
            second_budget=second_budget,
            alignment=alignment,
            max_sequences=max_sequences,
        )
        self._buffer_size = positive("buffer_size", buffer_size)
        self._pushed = 0
        self._numbers: list[int] = []
        self._units: list[int] = []
        self._second: list[int] = []

    def push(self, length: int, second: int = 0) -> list[list[int]]:
        """Add a sample. Samples are numbered from 0 in the order of their pushes.

        Args:
            length: tokens, at least 1.
            second: the second quantity, at least 0.

        Returns:
            The packs that became ready, none or one; each lists its samples, ascending.

        Raises:
            PackingError: a sample that fits no pack; it is not added.
        """
        units = self._units_of(length, second)
        self._add(units, index(second))
        return [self._pack()] if len(self._units) >= self._buffer_size else []

    def packs(self, units: Iterable[int], second: Iterable[int]) -> Iterator[list[int]]:
        """Add samples that are known to fit a pack; yields packs as `push` returns them."""
        lengths, others, numbers = iter(units), iter(second), count(self._pushed)
        while True:
            room = self._buffer_size - len(self._units)
            self._units += islice(lengths, room)
            added = len(self._units) - len(self._numbers)
            self._second += islice(others, added)
            self._numbers += islice(numbers, added)
            self._pushed += added
            if added < room:
                return
            yield self._pack()

    def _add(self, units: int, second: int) -> None:
        self._numbers.append(self._pushed)
        self._units.append(units)
        self._second.append(second)
        self._pushed += 1

    def flush(self) -> list[list[int]]:
        """Packs of all waiting samples. The packer is then empty, and its numbers continue."""
        packs = []
        while self._units:
            packs.append(self._pack())
        return packs

    def _units_of(self, length: int, second: int) -> int:
        """A sample's length in units of the alignment, if it fits a pack.

        Raises:
            PackingError: as `push`.
        """
        limits = self._limits
        try:
            tokens, extra = index(length), index(second)
        except TypeError:
            tokens, extra = 0, 0
        if tokens < 1 or extra < 0:
            raise PackingError(
                f"sample {self._pushed}: length is {length!r} and second is {second!r}, expected "
                f"integers of at least 1 and 0"
            )
        units = -(-tokens // limits.alignment)
        if units > limits.units:
            raise limits.too_long(f"sample {self._pushed}: length", tokens)
        if limits.second_budget is not None and extra > limits.second_budget:
            raise limits.too_much(f"sample {self._pushed}: second", extra)
        return units

    def _pack(self) -> list[int]:
        """Take the oldest sample and those that fill its pack best."""
        chosen = self._chosen()
        numbers, units, second = self._numbers, self._units, self._second
        pack = [numbers[place] for place in chosen]
        first = next((i for i, place in enumerate(chosen) if i != place), len(chosen))
        for place in reversed(chosen[first:]):
            del numbers[place], units[place], second[place]
        del numbers[:first], units[:first], second[:first]
        return pack

    def _chosen(self) -> list[int]:
        """Places in the buffer, ascending, the oldest first."""
        limits, units, second = self._limits, self._units, self._second
        budget = limits.second_budget
        is_scarcer = budget is not None and sum(second) * limits.units > sum(units) * budget
        taken, places = self._as_they_come(is_scarcer=is_scarcer)
        room = limits.units - sum([units[place] for place in taken])
        slots = (limits.max_sequences or len(units)) - len(taken)
        if budget is None:
            return taken + bounded(places, units, room, None, 0, slots)
        free = budget - sum([second[place] for place in taken])
        if is_scarcer:
            # Use the second budget up first, tokens after.
            some = [place for place in places if second[place]]
            picked = bounded(some, second, free, units, room, slots)
            room -= sum(units[place] for place in picked)
            free -= sum(second[place] for place in picked)
            slots -= len(picked)
            taken += picked
            places = [place for place in places if place not in picked]
        return sorted(taken + bounded(places, units, room, second, free, slots))

    def _as_they_come(self, *, is_scarcer: bool) -> tuple[list[int], Sequence[int]]:
        """Places that are taken from the oldest on, that one at least, and those to choose from.

        Args:
            is_scarcer: whether the second budget ends before the tokens.
        """
        limits, units, second = self._limits, self._units, self._second
        taken, last = [0], len(units) - BUFFER_SIZE
        if last <= 1:
            return taken, range(1, len(units))
        room = limits.units - units[0]
        free = sum(second) if limits.second_budget is None else limits.second_budget - second[0]
        most = (limits.max_sequences or len(units)) - BUFFER_SIZE // 2
        # What the next samples hold: those that are chosen from if the search ends here.
        tokens, others = sum(units[1 : 1 + BUFFER_SIZE]), sum(second[1 : 1 + BUFFER_SIZE])
        for at in range(1, last):
            if 2 * room <= tokens or len(taken) >= most or (is_scarcer and 2 * free <= others):
                return taken, range(at, at + BUFFER_SIZE)
            if units[at] <= room and second[at] <= free:
                taken.append(at)
                room -= units[at]
                free -= second[at]
            tokens += units[at + BUFFER_SIZE] - units[at]
            others += second[at + BUFFER_SIZE] - second[at]
        return taken, range(last, last + BUFFER_SIZE)


def bounded(
    places: Sequence[int],
    sizes: Sequence[int],
    room: int,
    others: Sequence[int] | None,
    other_room: int,
    slots: int,
) -> list[int]:
    """Places whose sizes fill `room` best under two more bounds.

    The result is exact where the best choice without these bounds obeys them. Otherwise the chosen
    places that are largest in `others` are set aside, or the smallest in size if there are too
    many. As few are set aside as bring the choice within bounds, and the rest is chosen again.

    Args:
        places: indices into `sizes` and `others`, ascending.
        sizes: at least 1 each.
        room: most of the sum of sizes.
        others: at least 0 each; None for no such bound.
        other_room: most of the sum of others.

    Returns:
        Places, ascending.
    """
    places = [place for place in places if sizes[place] <= room]
    if others is not None:
        places = [place for place in places if others[place] <= other_room]
    while True:
        chosen = [places[i] for i in fullest(room, [sizes[place] for place in places])]
        over = sum(others[place] for place in chosen) - other_room if others is not None else 0
        if others is not None and over > 0:
            aside = set()
            for place in sorted(chosen, key=lambda place: (others[place], place), reverse=True):
                if over <= 0:
                    break
                aside.add(place)
                over -= others[place]
        elif len(chosen) > slots:
            shortest = sorted(chosen, key=lambda place: (sizes[place], -place))
            aside = set(shortest[: len(chosen) - slots])
        else:
            return chosen
        places = [place for place in places if place not in aside]


def fullest(room: int, lengths: list[int]) -> list[int]:
    """The subset with the largest sum of at most `room`; exact.

    Args:
        room: at least 0.
        lengths: at least 1 each.

    Returns:
        Indices, ascending. Among subsets of that sum the one whose last index is smallest, then the
        one whose next to last is, and so on.
    """
    rooms = 1 << room
    before = []
    for length in lengths:
        if rooms & 1:
            break
        before.append(rooms)
        rooms |= rooms >> length
    left = (rooms & -rooms).bit_length() - 1
    chosen = []
    for i in range(len(before) - 1, -1, -1):
        if not before[i] >> left & 1:
            chosen.append(i)
            left += lengths[i]
    return chosen[::-1]
