"""How a window's samples become the bins of its global batches.

    modes none, in_batch   FixedPacker    consecutive samples, `micro_batch_size` to a bin
    online, scope stream   BudgetPacker   rows filled up to a token budget over the whole window;
                                          a global batch is `global_batch_size` rows
    online, scope batch    BudgetPacker   a global batch is `global_batch_size` samples, in as many
                                          rows as they fill

A packer is a function of the window's order and of its samples' lengths; it starts anew at every
window, so any window is planned alone. The last global batch of a window may be short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from vlmpack.alignment import round_up
from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.sharing import PlannedSamples
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.planned import shared_rows

Bin = tuple[int, ...]
"""Sample numbers that share a row (or the rows of one micro-batch)."""

Scope = Literal["stream", "batch"]

MIN_WINDOW_SAMPLES = 4096
BATCHES_PER_WINDOW = 64
"""Rows are counted in global batches, whose last one in a window is short: half a batch on average,
less than 1% of so many. A window has fewer where its rows hold more samples than was assumed: at 11
a row instead of STREAMED_SAMPLES_PER_ROW 12 batches, of which half a one is 4%."""

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
        """What a row holds at most; None where rows have no bound of their own."""


@dataclass(frozen=True, slots=True)
class FixedPacker:
    """Modes `none` and `in_batch`: consecutive samples, `micro_batch_size` to a bin.

    A global batch is a set of samples that does not depend on `micro_batch_size`.
    """

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
        budget: of a row.
        global_batch_size: rows in a global batch under scope `stream`, samples under `batch`.
        scope: whether rows are filled over the window, or inside fixed sets of samples.
        sizes: tokens and patches of samples.
        planned: what is planned of samples, where a row has what they begin with once.
        fullest: samples of the fullest row that is known: of all, or of a dry run; None for none.
    """

    budget: RowBudget
    global_batch_size: int
    scope: Scope
    sizes: Sizes
    planned: PlannedSamples | None = None
    fullest: int | None = None

    @property
    def in_sets(self) -> bool:
        """Whether a global batch is a set of samples, in as many rows as they fill."""
        return self.scope == "batch"

    def __call__(self, order: Int64s) -> list[tuple[Bin, ...]]:
        """The window's global batches; the last may be short."""
        whole = self.global_batch_size
        if self.in_sets:
            return [
                tuple(self.rows(order[start : start + whole]))
                for start in range(0, order.shape[0], whole)
            ]
        rows = self.rows(order)
        return [tuple(rows[start : start + whole]) for start in range(0, len(rows), whole)]

    def num_batches(self, count: int) -> int | None:
        """See Packer."""
        return -(-count // self.global_batch_size) if self.in_sets else None

    def rows(self, order: Int64s) -> list[Bin]:
        """The rows of some samples, none of them empty."""
        tokens, patches = self.sizes(order)
        samples: list[int] = order.tolist()
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
