"""How a window's samples become the bins of its global batches.

    modes none, in_batch   FixedPacker    consecutive samples, `micro_batch_size` to a bin
    online, scope stream   BudgetPacker   rows filled up to a token budget over the whole window;
                                          a global batch is `global_batch_size` rows
    online, scope batch    BudgetPacker   a global batch is `global_batch_size` samples, in as many
                                          rows as they fill

A packer is a function of the window's order and of its samples' lengths. It starts anew at every
window, so any window can be planned alone. The last global batch of a window may be short. Where
rows share prefixes, `PlannedSamples` says what is planned of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from vlmpack.alignment import round_up
from vlmpack.data.index.table import Int64s, SampleTable
from vlmpack.packing.batch import Prefix
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.prefix_rows import (
    PlannedSample,
    PlannedSequence,
    goes_on,
    planned_segments,
    shared_rows,
)

PlannedSamples = Callable[[Int64s], list[PlannedSample]]
"""(n,) sample numbers -> what is planned of each."""


def planned_samples(table: SampleTable, numbers: Int64s) -> list[PlannedSample]:
    """(n,) what is planned of samples."""
    assert table.prefixes is not None
    tokens = table.sequence_tokens(numbers).tolist()
    lengths = table.prefixes.lengths[numbers].tolist()
    digests = table.prefixes.digests[numbers].tolist()
    planned = []
    for counts, places, names in zip(tokens, lengths, digests, strict=True):
        prefixes = tuple(
            Prefix(length, digest.to_bytes(8, "little", signed=True))
            for length, digest in zip(places, names, strict=True)
            if length
        )
        planned.append(tuple(PlannedSequence(count, prefixes) for count in counts))
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRows:
    """The contents of rows, with prefixes that neighbours share counted once.

    Args:
        slots: (b,) of their segments, alignment counted.
        tokens: (b,) of these.
        squares: (b,) attention's cost in terms of single samples. A segment of l tokens after a
            prefix of p counts l * l + 2 * l * p: the square of p + l without that of p.
        starts_anew: (n,) bool, whether a sample shares nothing with the one before it in its row,
            so that its images are new there; never for a hole.
    """

    slots: Int64s
    tokens: Int64s
    squares: Int64s
    starts_anew: npt.NDArray[np.bool_]


def held_rows(samples: Sequence[PlannedSample], rows: Iterable[int], alignment: int) -> HeldRows:
    """The contents of rows (b,), in one pass over their samples (n,). A hole has no tokens."""
    slots, tokens, squares = [], [], []
    starts_anew = np.zeros(len(samples), dtype=np.bool_)
    start = 0
    for count in rows:
        places = [place for place in range(start, start + count) if samples[place][0].length]
        row = [samples[place] for place in places]
        segments = planned_segments(row, alignment)
        lengths = [each.length for each in segments]
        slots.append(sum(round_up(length, alignment) for length in lengths))
        tokens.append(sum(lengths))
        squares.append(sum(each.stop**2 - each.start**2 for each in segments))
        for number, place in enumerate(places):
            starts_anew[place] = not number or not goes_on(row[number - 1], row[number], alignment)
        start += count
    return HeldRows(
        slots=np.asarray(slots, dtype=np.int64),
        tokens=np.asarray(tokens, dtype=np.int64),
        squares=np.asarray(squares, dtype=np.int64),
        starts_anew=starts_anew,
    )


def held_tokens(table: SampleTable, rows: Iterable[Int64s], alignment: int) -> int:
    """Tokens of rows without alignment, counting once what neighbours share."""
    held = (held_rows(planned_samples(table, row), [row.size], alignment) for row in rows)
    return sum(int(row.tokens.sum()) for row in held)


Bin = tuple[int, ...]
"""Sample numbers that share a row (or the rows of one micro-batch)."""

Scope = Literal["stream", "batch"]

MIN_WINDOW_SAMPLES = 4096
BATCHES_PER_WINDOW = 64
"""The last global batch of a window is short: half a batch on average, below 1% of so many. A
window has fewer where rows hold more samples than assumed: at 11 a row instead of
STREAMED_SAMPLES_PER_ROW it has 12, of which half a one is 4%."""

STREAMED_SAMPLES_PER_ROW = 2
"""Assumed where nothing is indexed, for the size of a window."""


class Packer(Protocol):
    """A window's sample order -> its global batches."""

    def __call__(self, order: Int64s) -> list[tuple[Bin, ...]]:
        """The window's global batches; the last may be short."""

    def num_batches(self, count: int) -> int | None:
        """Global batches of a window of `count` samples, where it follows from the count alone."""

    @property
    def budget(self) -> RowBudget | None:
        """The most that a row holds. None if rows have no bound of their own."""


@dataclass(frozen=True, slots=True)
class FixedPacker:
    """Modes `none` and `in_batch`: consecutive samples, `micro_batch_size` to a bin. Global batches
    do not depend on `micro_batch_size`."""

    global_batch_size: int
    micro_batch_size: int

    def __call__(self, order: Int64s) -> list[tuple[Bin, ...]]:
        """The window's global batches; the last may be short."""
        samples: list[int] = order.tolist()
        whole, part = self.global_batch_size, self.micro_batch_size
        return [
            tuple(
                tuple(samples[at : min(at + part, start + whole)])
                for at in range(start, min(start + whole, len(samples)), part)
            )
            for start in range(0, len(samples), whole)
        ]

    def num_batches(self, count: int) -> int:
        """See Packer."""
        return -(-count // self.global_batch_size)

    @property
    def budget(self) -> None:
        """See Packer: a bin takes what its samples take."""


Sizes = Callable[[Int64s], tuple[Int64s, Int64s]]
"""(n,) sample numbers -> their (n,) tokens and (n,) vision patches."""

AlignedSizes = Callable[[Int64s, int], tuple[Int64s, Int64s]]
"""The same with the multiple that each sequence of a pair is rounded up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPacker:
    """Mode `online`: rows filled up to a budget by StreamPacker, in the order they become full.

    Args:
        global_batch_size: rows in a global batch under scope `stream`, samples under `batch`.
        scope: whether rows are filled over the window, or inside fixed sets of samples.
        fullest: samples of the fullest known row, from all rows or from a dry run. None if none is
            known.
    """

    budget: RowBudget
    global_batch_size: int
    scope: Scope
    sizes: Sizes
    planned: PlannedSamples | None = None
    fullest: int | None = None

    @property
    def packs_by_batch(self) -> bool:
        """Whether a global batch is a set of samples, in as many rows as they fill."""
        return self.scope == "batch"

    def __call__(self, order: Int64s) -> list[tuple[Bin, ...]]:
        """The window's global batches; the last may be short."""
        whole = self.global_batch_size
        if self.packs_by_batch:
            return [
                tuple(self.rows(order[start : start + whole]))
                for start in range(0, order.shape[0], whole)
            ]
        rows = self.rows(order)
        return [tuple(rows[start : start + whole]) for start in range(0, len(rows), whole)]

    def num_batches(self, count: int) -> int | None:
        """See Packer."""
        return -(-count // self.global_batch_size) if self.packs_by_batch else None

    def rows(self, order: Int64s) -> list[Bin]:
        """The rows of some samples, none of them empty."""
        samples: list[int] = order.tolist()
        tokens, patches = self.sizes(order)
        if self.planned is None:
            rows = self.budget.rows(tokens, patches)
        else:
            rows = shared_rows(self.planned(order), patches, self.budget)
        return [tuple(samples[place] for place in row) for row in rows]


def window_samples(global_batch_size: int, samples_per_row: int = 0) -> int:
    """Samples in a window: whole global batches, at least MIN_WINDOW_SAMPLES.

    Args:
        global_batch_size: in samples; in rows where `samples_per_row` is given.
        samples_per_row: about; 0 where a global batch is counted in samples.
    """
    least = MIN_WINDOW_SAMPLES
    if samples_per_row:
        least = max(least, BATCHES_PER_WINDOW * global_batch_size * samples_per_row)
    return round_up(least, global_batch_size)
