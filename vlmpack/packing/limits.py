"""Bounds of a pack, the checks that the packers share, and how few packs there can be. No torch.

Packers count tokens in units of the alignment. A length is rounded up to whole units, a capacity
down. A plan with as few packs as `fewest_packs` is optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmpack.errors import PackingError

MAX_COUNT = 1 << 31
"""The most tokens that a length is rounded up to, and the most ranks."""

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Lengths = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLimits:
    """Bounds of one pack.

    Args:
        capacity: tokens, alignment included.
        second_budget: bound of a second quantity, as of vision patches. None for no bound.
        alignment: every length is rounded up to a multiple of this.
        max_sequences: most samples in a pack. None for as many as fit.

    Raises:
        PackingError: a bound that is not a positive integer, or a capacity below the alignment.
    """

    capacity: int
    second_budget: int | None = None
    alignment: int = 1
    max_sequences: int | None = None

    def __post_init__(self) -> None:
        for name in ("capacity", "second_budget", "alignment", "max_sequences"):
            value = getattr(self, name)
            if value is None and name in ("second_budget", "max_sequences"):
                continue
            number = positive(name, value)
            object.__setattr__(self, name, number)
        if self.alignment > MAX_COUNT:
            raise PackingError(
                f"alignment is {short_value(self.alignment)}, expected at most {MAX_COUNT:,}"
            )
        if self.capacity < self.alignment:
            raise PackingError(
                f"capacity is {short_value(self.capacity)}, below alignment {self.alignment}: no "
                "sample fits"
            )

    @property
    def units(self) -> int:
        """Whole units of the alignment in a pack."""
        return self.capacity // self.alignment

    def too_long(self, where: str, length: int) -> PackingError:
        """The error for a length above the capacity."""
        rounded = -(-length // self.alignment) * self.alignment
        note = f" ({rounded} at alignment {self.alignment})" if rounded != length else ""
        return PackingError(
            f"{where} is {length}{note}, above capacity {self.capacity}; drop or shorten the "
            f"sample, or raise capacity"
        )

    def too_much(self, where: str, second: int) -> PackingError:
        """The error for a second quantity above its budget."""
        return PackingError(
            f"{where} is {second}, above second_budget {self.second_budget}; drop or shrink the "
            f"sample, or raise second_budget"
        )


def _integer(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def positive(name: str, value: object) -> int:
    """An integer of at least 1.

    Raises:
        PackingError: anything else, named.
    """
    number = _integer(value)
    if number is None or number < 1:
        raise PackingError(f"{name} is {short_value(value)}, expected an integer of at least 1")
    return number


def whole(name: str, value: object) -> int:
    """An integer that an int64 holds.

    Raises:
        PackingError: anything else, named.
    """
    number = _integer(value)
    if number is None or not -(2**63) <= number < 2**63:
        raise PackingError(f"{name} is {short_value(value)}, expected an integer")
    return number


def short_value(value: object) -> str:
    """A value for a message. Python would not write out huge numbers, so these give their size."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length():,} bits"
    return f"{value!r:.100}"


def integers(name: str, values: Lengths, *, least: int) -> Integers:
    """(n,) int64 of at least `least`.

    Raises:
        PackingError: not one-dimensional, not integers, or a value below `least`; named, with the
            first such sample.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise PackingError(f"{name} must be integers of shape (n,): {error}") from error
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PackingError(
            f"{name} must be integers of shape (n,), found {array.dtype} of shape {array.shape}"
        )
    low = int(array.min())
    if low < least:
        first = int(np.argmax(array < least))
        raise PackingError(f"{name}[{first}] is {array[first]}, expected at least {least}")
    if int(array.max()) > np.iinfo(np.int64).max:
        raise PackingError(f"{name} holds {array.max()}, more than an int64 can")
    return array.astype(np.int64)


EXACT_IN_FLOAT = 1 << 53
"""Sums below it are exact in float64, which is what `np.bincount` adds in."""

COUNTED = 1 << 22
"""Largest pack whose sizes are counted one by one."""


def fewest_packs(units: Integers, second: Integers | None, limits: PackLimits) -> int:
    """A lower bound on the number of packs of any plan.

    Args:
        units: (n,) lengths in units of the alignment, n at least 1.
        second: (n,) the second quantity; None for no bound on it.
    """
    least = _fewest(units, limits.units)
    if second is not None:
        assert limits.second_budget is not None
        least = max(least, _fewest(second, limits.second_budget))
    if limits.max_sequences is not None:
        least = max(least, -(-len(units) // limits.max_sequences))
    return least


def _fewest(sizes: Integers, capacity: int) -> int:
    """The lower bound by the sum of sizes, and by what fits into one pack with large items.

    L2 of Martello and Toth, for every t up to half a pack. A size above capacity - t lies alone,
    and no two sizes above half a pack lie together. Sizes from t to a half fill the room that these
    leave, and the rest needs packs of its own.
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
    above = capacity - t + 1  # the first size that fits with none from t on
    room = (count[above] - count[half]) * capacity - (mass[above] - mass[half])
    over = -(-(mass[half] - mass[t] - room) // capacity)
    return max(least, int(count[-1] - count[half] + over.max(initial=0)))


def exact_sum(values: Integers) -> int:
    """The sum of values that an int64 may not hold the sum of."""
    if float(values.sum(dtype=np.float64)) < EXACT_IN_FLOAT:
        return int(values.sum())
    return sum(values.tolist())


def sums_by_pack(packs: Integers, values: Integers) -> Integers:
    """(packs,) the sum of the values in each pack; every pack is used.

    Args:
        values: (n,) at least 0; an int64 holds the sum in each pack.
    """
    if float(values.sum(dtype=np.float64)) < EXACT_IN_FLOAT:
        return np.bincount(packs, weights=values).astype(np.int64)
    sums = np.zeros(int(packs.max()) + 1, np.int64)
    np.add.at(sums, packs, values)
    return sums
