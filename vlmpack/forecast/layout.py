"""Planned rows as arrays, and the slots that a run computes for them.

n samples lie in b bins, a bin is a micro-batch; s global batches hold so many bins each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vlmpack.data.index.table import Int64s
from vlmpack.data.modes import RowShape
from vlmpack.data.plan.packers import Bin, Sizes
from vlmpack.data.plan.packs import PackArrays


@dataclass(frozen=True)
class Layout:
    """The global batches of one epoch.

    Args:
        numbers, tokens, patches: (n,) of the samples in the order of their bins; no token: a known
            hole.
        bins: (b,) samples in each bin, none of them 0.
        steps: (s,) bins of each global batch.
        sequences: (n, k) tokens of each sequence of the samples: 2 of a pair, else 1.
    """

    numbers: Int64s
    tokens: Int64s
    patches: Int64s
    bins: Int64s
    steps: Int64s
    sequences: Int64s

    @cached_property
    def squares(self) -> Int64s:
        """(n,) sum of the squared lengths of each sample's sequences."""
        found: Int64s = (self.sequences**2).sum(axis=1)
        return found

    @cached_property
    def bin_starts(self) -> Int64s:
        """(b,) the place of each bin's first sample."""
        return np.cumsum(self.bins) - self.bins

    @cached_property
    def step_starts(self) -> Int64s:
        """(s,) the place of each global batch's first bin."""
        return np.cumsum(self.steps) - self.steps

    def by_bin(self, values: Int64s) -> Int64s:
        """(b,) sums of (n,) values of samples."""
        return np.add.reduceat(values, self.bin_starts) if values.size else values

    def longest_by_bin(self, values: Int64s) -> Int64s:
        """(b,) maxima of (n,) values of samples."""
        return np.maximum.reduceat(values, self.bin_starts) if values.size else values

    def sets(self) -> list[Int64s]:
        """The places of the samples of each global batch."""
        if not self.steps.size:
            return []
        counts = np.add.reduceat(self.bins, self.step_starts)
        return np.split(np.arange(self.numbers.size), np.cumsum(counts)[:-1])

    def packed_as(self, packs: Sequence[Int64s], steps: Int64s) -> Layout:
        """The same samples, or some of them, in other bins.

        Args:
            packs: the places of each bin's samples.
            steps: (s,) bins of each global batch.
        """
        order = np.concatenate([np.empty(0, np.int64), *packs])
        return Layout(
            self.numbers[order],
            self.tokens[order],
            self.patches[order],
            np.fromiter(map(len, packs), np.int64, len(packs)),
            steps,
            self.sequences[order],
        )

    @cached_property
    def trained(self) -> Int64s:
        """(b,) samples of each bin that are no holes."""
        return self.by_bin((self.tokens > 0).astype(np.int64))


def layout_of(
    windows: Iterable[Sequence[tuple[Bin, ...]]],
    sizes: Sizes,
    sequence_tokens: Callable[[Int64s], Int64s],
) -> Layout:
    """The layout of an epoch.

    Args:
        windows: the global batches of each window, as a packer makes them.
        sizes: tokens and patches of samples.
        sequence_tokens: (n, k) tokens of each of their sequences.
    """
    rows = PackArrays.of(windows)
    numbers = rows.numbers
    sequences = sequence_tokens(numbers)
    return Layout(numbers, *sizes(numbers), rows.sizes, np.diff(rows.batches), sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is computed for each bin.

    Args:
        rows: (b,) rows.
        slots: (b,) tokens and padding.
        squares: (b,) sum of the squared lengths that attention runs over.
        empty_slots: slots of a bin without samples.
    """

    rows: Int64s
    slots: Int64s
    squares: Int64s
    empty_slots: int


def lay_out(layout: Layout, shape: RowShape, shared: Int64s | None = None) -> Rows:
    """Rows and slots of every bin, as `PackCollator` and `PadCollator` make them.

    Args:
        layout: the bins.
        shape: of the collator's rows.
        shared: (b,) slots of each bin's segments, where they share what they begin with; what
            attention runs over is then that of the samples alone, which is more.
    """
    trained = layout.trained
    if shape.padded:
        width = _up(layout.longest_by_bin(layout.sequences.max(axis=1)), shape.row_multiple)
        width = np.maximum(width, shape.row_multiple)
        each = layout.sequences.shape[1]
        rows = np.maximum(trained * each, 1)  # a bin of holes is one row of padding
        return Rows(
            rows=rows, slots=rows * width, squares=rows * width**2, empty_slots=shape.row_multiple
        )
    physical = _up(layout.sequences, shape.sequence_multiple)
    filled = layout.by_bin(physical.sum(axis=1)) if shared is None else shared
    least = max(shape.sequence_multiple, shape.row_multiple, shape.width)
    most = trained.max(initial=0) if shape.most_filled is None else shape.most_filled
    width = np.where(trained <= most, shape.width, 0)
    slots = np.where(trained > 0, np.maximum(_up(filled, shape.row_multiple), width), least)
    squares = layout.by_bin((physical**2).sum(axis=1)) + (slots - filled) ** 2
    return Rows(rows=np.ones_like(slots), slots=slots, squares=squares, empty_slots=least)


def empty_bins(layout: Layout, copies: int) -> int:
    """Bins without samples that fill global batches up, so that all model copies take part."""
    return int((-layout.steps % copies).sum())


def _up(values: Int64s, multiple: int) -> Int64s:
    return -(-values // multiple) * multiple
