"""What is planned of the samples of a split, where rows have what they begin with once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vlmpack.data.index.table import Int64s, SampleTable
from vlmpack.packing.batch import Cut
from vlmpack.packing.planned import PlannedSample, PlannedSequence, shared_stretches

PlannedSamples = Callable[[Int64s], list[PlannedSample]]
"""(n,) sample numbers -> what is planned of each."""


def planned_samples(table: SampleTable, numbers: Int64s) -> list[PlannedSample]:
    """(n,) what is planned of samples.

    Args:
        table: with cuts.
        numbers: (n,) of the samples.
    """
    assert table.cuts is not None
    tokens = table.sequence_tokens(numbers).tolist()
    lengths, digests = table.cuts.lengths[numbers].tolist(), table.cuts.digests[numbers].tolist()
    found = []
    for counts, places, names in zip(tokens, lengths, digests, strict=True):
        cuts = tuple(
            Cut(length, digest.to_bytes(8, "little", signed=True))
            for length, digest in zip(places, names, strict=True)
            if length
        )
        found.append(tuple(PlannedSequence(count, cuts) for count in counts))
    return found


def held_tokens(table: SampleTable, rows: Iterable[Int64s], alignment: int) -> int:
    """Tokens of rows, without alignment, that hold what neighbours share once.

    Args:
        table: with cuts.
        rows: the numbers of the samples of each, in row order.
        alignment: multiple that segments are rounded up to.
    """
    found = (shared_stretches(planned_samples(table, row), alignment) for row in rows)
    return sum(each.length for stretches in found for each in stretches)
