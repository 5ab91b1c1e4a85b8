"""What samples take in a planned row where it holds what they begin with once.

    order    a0 a1 a2 | b0 | c0 c1      neighbours with an equal prefix are one item of the packer
    row      [A a0 a1 a2] [b0] ...      A once, and each sample's own

An item is as many neighbours as share something and fit a row together; a group that goes over the
end of a row is cut there, and the next item has its beginning again. The packer takes items as
units, so no group that fits a row is split. What an item takes is counted by the function that
lays rows out (`vlmpack.packing.shared`), so a planned row is as large as the row that is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlmpack.alignment import round_up
from vlmpack.packing.batch import Prefix
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.limits import Integers
from vlmpack.packing.shared import Stretch, alike, stretches_of


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence before anybody has read it.

    Args:
        length: tokens.
        prefixes: where it may fork, the shorter one first.
    """

    length: int
    prefixes: tuple[Prefix, ...]


PlannedSample = tuple[PlannedSequence, ...]
"""The sequences of a sample: two of a pair, else one."""


@dataclass(frozen=True, slots=True)
class Item:
    """Neighbours that a row takes together.

    Args:
        places: of its samples in the order, consecutive.
        tokens: that they take in a row, segments rounded up.
        patches: of their images, a shared one once.
    """

    places: range
    tokens: int
    patches: int


def planned_tokens(samples: Sequence[PlannedSample], alignment: int) -> int:
    """Slots of some samples in a row, one behind the other, what they share once.

    Args:
        alignment: multiple that each segment is rounded up to.
    """
    return sum(round_up(each.length, alignment) for each in shared_stretches(samples, alignment))


def shared_stretches(samples: Sequence[PlannedSample], alignment: int) -> list[Stretch]:
    """How some samples are laid out in a row; arguments as of `planned_tokens`."""
    sequences = [sequence for sample in samples for sequence in sample]
    return stretches_of(sequences, least=alignment)


def items_of(
    samples: Sequence[PlannedSample], patches: Sequence[int], budget: RowBudget
) -> Iterator[Item]:
    """Neighbours that share something, as many at a time as fit a row.

    Args:
        samples: in the order of the packer.
        patches: of each sample's images.
        budget: of a row.
    """
    most = len(samples) if budget.max_sequences is None else budget.max_sequences
    first = 0
    while first < len(samples):
        company = 1
        while first + company < len(samples) and company < most:
            place = first + company
            if not goes_on(samples[place - 1], samples[place], budget.alignment):
                break
            company += 1
        kept, tokens = _fitting(samples[first : first + company], budget)
        yield Item(range(first, first + kept), tokens, patches[first])
        first += kept


def _fitting(samples: Sequence[PlannedSample], budget: RowBudget) -> tuple[int, int]:
    """How many of some neighbours, from the first on, fit a row together, and the tokens that they
    take; one is always taken.

    The number is searched by halves. A sample more takes more, but where rounding up decides: then
    a larger number may fit than the one that is found.
    """
    low, high = 1, len(samples)
    while low < high:
        middle = (low + high + 1) // 2
        if budget.takes(planned_tokens(samples[:middle], budget.alignment)):
            low = middle
        else:
            high = middle - 1
    return low, planned_tokens(samples[:low], budget.alignment)


def shared_rows(
    samples: Sequence[PlannedSample], patches: Integers, budget: RowBudget
) -> list[list[int]]:
    """Rows of samples that come in order, as places in that order; as `RowBudget.rows`, by items.

    The packer counts items, and holds as many of them as the lengths of the samples alone ask for.
    Where patches have no bound, samples are its second quantity; else a
    row that it gave more than `budget.max_sequences` of them is cut between items.
    """
    items = list(items_of(samples, patches.tolist(), budget))
    tokens = np.asarray([item.tokens for item in items], dtype=np.int64)
    second = np.asarray([item.patches for item in items], dtype=np.int64)
    alone = [sum(round_up(each.length, budget.alignment) for each in one) for one in samples]
    waiting = budget.waiting(np.asarray(alone, dtype=np.int64))
    items_alone = replace(budget, max_sequences=None, buffer=waiting)
    if budget.max_patches is None and budget.max_sequences is not None:
        items_alone = replace(items_alone, max_patches=budget.max_sequences)
        second = np.asarray([len(item.places) for item in items], dtype=np.int64)
    rows = []
    for row in items_alone.rows(tokens, second):
        rows += _within(budget.max_sequences, [items[place].places for place in row])
    return rows


def _within(most: int | None, items: Sequence[range]) -> list[list[int]]:
    """The places of some items, in as many rows as a bound on samples asks for."""
    rows: list[list[int]] = [[]]
    for places in items:
        if most is not None and rows[-1] and len(rows[-1]) + len(places) > most:
            rows.append([])
        rows[-1] += places
    return rows


def goes_on(one: PlannedSample, other: PlannedSample, least: int) -> bool:
    """Whether a sample has so many tokens in common with the one before it."""
    return alike(one[-1], other[0]) >= least
