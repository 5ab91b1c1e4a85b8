"""What is planned of the samples of a split, where rows have what they begin with once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmpack.alignment import round_up
from vlmpack.data.index.table import Int64s, SampleTable
from vlmpack.packing.batch import Prefix
from vlmpack.packing.planned import PlannedSample, PlannedSequence, goes_on, shared_stretches

PlannedSamples = Callable[[Int64s], list[PlannedSample]]
"""(n,) sample numbers -> what is planned of each."""


def planned_samples(table: SampleTable, numbers: Int64s) -> list[PlannedSample]:
    """(n,) what is planned of samples.

    Args:
        table: with prefixes.
        numbers: (n,) of the samples.
    """
    assert table.prefixes is not None
    tokens = table.sequence_tokens(numbers).tolist()
    lengths = table.prefixes.lengths[numbers].tolist()
    digests = table.prefixes.digests[numbers].tolist()
    found = []
    for counts, places, names in zip(tokens, lengths, digests, strict=True):
        prefixes = tuple(
            Prefix(length, digest.to_bytes(8, "little", signed=True))
            for length, digest in zip(places, names, strict=True)
            if length
        )
        found.append(tuple(PlannedSequence(count, prefixes) for count in counts))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRows:
    """What rows hold, with what neighbours share once.

    Args:
        slots: (b,) of their segments, alignment counted.
        tokens: (b,) of these.
        squares: (b,) what attention runs over, counted as of samples alone: a segment of l tokens
            that goes on from p has l * l + 2 * l * p, which is the square of p + l without that of
            p, since p is in the row once.
        begins: (n,) bool, whether a sample shares nothing with the one before it in its row, so
            that its images are in the row for the first time; never of a hole.
    """

    slots: Int64s
    tokens: Int64s
    squares: Int64s
    begins: npt.NDArray[np.bool_]


def held_rows(samples: Sequence[PlannedSample], rows: Iterable[int], alignment: int) -> HeldRows:
    """What rows hold, in one pass over their samples.

    Args:
        samples: (n,) in the order of their rows; a hole has no tokens.
        rows: (b,) how many of them each has.
        alignment: multiple that segments are rounded up to.
    """
    slots, tokens, squares = [], [], []
    begins = np.zeros(len(samples), dtype=np.bool_)
    start = 0
    for count in rows:
        places = [place for place in range(start, start + count) if samples[place][0].length]
        row = [samples[place] for place in places]
        stretches = shared_stretches(row, alignment)
        lengths = [each.length for each in stretches]
        slots.append(sum(round_up(length, alignment) for length in lengths))
        tokens.append(sum(lengths))
        squares.append(sum(each.stop**2 - each.start**2 for each in stretches))
        for number, place in enumerate(places):
            begins[place] = not number or not goes_on(row[number - 1], row[number], alignment)
        start += count
    return HeldRows(
        slots=np.asarray(slots, dtype=np.int64),
        tokens=np.asarray(tokens, dtype=np.int64),
        squares=np.asarray(squares, dtype=np.int64),
        begins=begins,
    )


def held_tokens(table: SampleTable, rows: Iterable[Int64s], alignment: int) -> int:
    """Tokens of rows, without alignment, that hold what neighbours share once.

    Args:
        table: with prefixes.
        rows: the numbers of the samples of each, in row order.
        alignment: multiple that segments are rounded up to.
    """
    found = (held_rows(planned_samples(table, row), [row.size], alignment) for row in rows)
    return sum(int(row.tokens.sum()) for row in found)
