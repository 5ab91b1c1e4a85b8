"""Which rank trains which bins of a global batch: whole bins, equally many each, by their cost.

The plan decides the members of the batch, so an optimizer step computes the same whatever the
ranks. Only the slowest rank's time changes. The cost of a bin follows from its tokens, the sum of
its squared sequence lengths, and its vision patches. Shared prefixes count once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.packers import Bin, PlannedSamples, Sizes, held_rows
from vlmpack.packing.balance import balance

Floats = npt.NDArray[np.float64]


class RowCost(Protocol):
    """The cost of rows on a model, phase by phase (language, vision)."""

    def __call__(
        self, tokens: Int64s, squares: Int64s, patches: Int64s, *, patch_squares: Int64s
    ) -> Floats:
        """(n, k) costs.

        Args:
            tokens: (n,) tokens of each row.
            squares: (n,) sums of the squared lengths of its sequences.
            patches: (n,) its vision patches.
            patch_squares: (n,) sums of the squared patches of its samples: what attention inside an
                image costs, exact where a sample has one image, else an upper bound.
        """


@dataclass(frozen=True, slots=True)
class Known:
    """The facts about samples that are known before they are read.

    Args:
        sequence_tokens: (n, k) tokens of each of their sequences: 2 of a pair, else 1.
        planned: what is planned of them, where rows share prefixes.
        multiple: that the segments of those rows are rounded up to.
    """

    sizes: Sizes
    sequence_tokens: Callable[[Int64s], Int64s]
    planned: PlannedSamples | None = None
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class RankBins:
    """A global batch as it is dealt to ranks.

    Args:
        imbalance: the largest cost of a rank over the mean, all phases together; 1.0 is even.
    """

    bins: list[list[Bin]]
    imbalance: float


def token_cost(
    tokens: Int64s, squares: Int64s, patches: Int64s, *, patch_squares: Int64s
) -> Floats:
    """(n, 1) tokens: the cost where nothing is known of the model."""
    return tokens.astype(np.float64)[:, None]


def bin_costs(bins: Sequence[Bin], known: Known, row_cost: RowCost) -> Floats:
    """(n, k) costs of bins, 0 for empty ones."""
    counts = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
    numbers = np.fromiter((n for samples in bins for n in samples), np.int64, int(counts.sum()))
    tokens, patches = known.sizes(numbers)
    owner = np.repeat(np.arange(len(bins)), counts)

    def summed(values: Int64s) -> Int64s:
        return np.bincount(owner, weights=values, minlength=len(bins)).astype(np.int64)

    if known.planned is None:
        held = summed(tokens), summed((known.sequence_tokens(numbers) ** 2).sum(axis=1))
    else:
        rows = held_rows(known.planned(numbers), counts.tolist(), known.multiple)
        held = rows.tokens, rows.squares
        patches = np.where(rows.starts_anew, patches, 0)
    costs = row_cost(*held, summed(patches), patch_squares=summed(patches * patches))
    return np.where(counts[:, None] > 0, costs, 0.0)


def assign(bins: Sequence[Bin], dp: int) -> list[list[Bin]]:
    """Deals whole bins to `dp` ranks in equal numbers, in turn; empty bins come last.

    Returns:
        One list per rank, all of the same length: `ceil(len(bins) / dp)`.
    """
    filled = fill_up(bins, dp)
    return [filled[rank::dp] for rank in range(dp)]


def fill_up(bins: Sequence[Bin], dp: int) -> list[Bin]:
    """The bins, with empty ones behind them up to a multiple of `dp`."""
    return [*bins, *([()] * (-len(bins) % dp))]


def bins_by_rank(
    bins: Sequence[Bin], dp: int, *, known: Known, row_cost: RowCost, balanced: bool
) -> RankBins:
    """Deal a global batch's bins to ranks: by cost if `balanced`, else in turn."""
    if dp == 1:
        return RankBins([list(bins)], 1.0)
    filled = fill_up(bins, dp)
    costs = bin_costs(filled, known, row_cost)
    if balanced:
        dealt = balance(costs, dp)
    else:
        dealt = np.arange(len(filled)).reshape(-1, dp).T
    loads = costs.sum(axis=1)[dealt].sum(axis=1)
    mean = float(loads.mean())
    # Empty bins last: a replica without a sample in its first micro-batch reads as a fault.
    ordered = [sorted(row, key=lambda item: (not filled[item], item)) for row in dealt.tolist()]
    return RankBins(
        [[filled[item] for item in row] for row in ordered],
        float(loads.max()) / mean if mean else 1.0,
    )
