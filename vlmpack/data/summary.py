"""What a split holds, in numbers a person reads before training starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmpack.data.overlong import Fitted
from vlmpack.data.plan import Plan
from vlmpack.data.table import Int64s

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """The figures of one split.

    Args:
        num_shards, num_samples: as indexed, bad samples included.
        num_usable: samples that an epoch can train on.
        num_dropped: over-long samples that the plan leaves out.
        num_shrunk: samples whose images are made smaller to fit.
        num_bad: error class -> samples already known to be bad; they stay as holes.
        num_tokens, num_image_tokens, num_label_tokens: of the usable samples, once each.
        length_percentiles: percentile -> tokens, of the usable samples.
        epoch_samples, epoch_steps: draws and global batches of an epoch.
        epoch_tokens: tokens of the first epoch's draws.
        padded_slots: slots of the first epoch's micro-batches in mode `none`, each padded to its
            longest sample.
        packed_slots: slots of the same micro-batches as packed rows, without alignment.
    """

    num_shards: int
    num_samples: int
    num_usable: int
    num_dropped: int
    num_shrunk: int
    num_bad: dict[str, int]
    num_tokens: int
    num_image_tokens: int
    num_label_tokens: int
    length_percentiles: dict[int, int]
    epoch_samples: int
    epoch_steps: int
    epoch_tokens: int
    padded_slots: int
    packed_slots: int

    @property
    def padding_removed(self) -> int:
        """Slots that packing saves in the first epoch."""
        return self.padded_slots - self.packed_slots


def summarise(fitted: Fitted, plan: Plan, *, epoch_steps: int, bins: Sequence[int]) -> DataSummary:
    """The figures of a split.

    Args:
        fitted: its samples, after the over-long policy.
        plan: its plan.
        epoch_steps: global batches in an epoch.
        bins: the number of samples in each bin of an epoch, in plan order.
    """
    table = fitted.table
    usable = np.flatnonzero(fitted.eligible & ~table.bad)
    tokens = table.num_tokens[usable]
    order = np.concatenate([plan.window_order(0, w) for w in range(plan.num_windows)])
    padded, packed = count_slots(table.num_tokens[order], np.asarray(bins, dtype=np.int64))
    return DataSummary(
        num_shards=len(table.shards),
        num_samples=table.num_samples,
        num_usable=int(usable.size),
        num_dropped=len(fitted.dropped),
        num_shrunk=len(table.shrunk),
        num_bad=dict(sorted(Counter(kind for kind, _ in table.faults.values()).items())),
        num_tokens=int(tokens.sum()),
        num_image_tokens=int(table.num_image_tokens[usable].sum()),
        num_label_tokens=int(table.num_label_tokens[usable].sum()),
        length_percentiles={
            percent: int(np.percentile(tokens, percent, method="nearest"))
            for percent in PERCENTILES
        },
        epoch_samples=plan.epoch_size,
        epoch_steps=epoch_steps,
        epoch_tokens=int(table.num_tokens[order].sum()),
        padded_slots=padded,
        packed_slots=packed,
    )


def count_slots(lengths: Int64s, bins: Int64s) -> tuple[int, int]:
    """(slots when every bin is padded to its longest sample, slots when it is packed).

    Args:
        lengths: (n,) tokens of each sample in plan order; 0 for a hole.
        bins: (b,) samples in each bin, in order; they sum to n.
    """
    starts = np.concatenate(([0], np.cumsum(bins)))[:-1]
    longest = np.maximum.reduceat(lengths, starts)
    rows = np.add.reduceat((lengths > 0).astype(np.int64), starts)
    return int((longest * rows).sum()), int(lengths.sum())
