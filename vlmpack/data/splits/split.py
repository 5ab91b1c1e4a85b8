"""A split as the pipeline uses it: all indexed before the plan, or indexed as the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.table import Int64s, SampleRef
from vlmpack.data.loading.read import SkippedSample
from vlmpack.data.plan.batches import Cursors, Plan, PlannedBatch, Position
from vlmpack.data.plan.packers import Bin
from vlmpack.data.plan.packs import PackPlan
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits.summary import DataSummary, EpochLength

OnDropped = Callable[[Sequence[SkippedSample]], None]


class Split(Protocol):
    """What the pipeline asks of a split."""

    @property
    def plan(self) -> Plan | WindowPlan | PackPlan:
        """The plan of the split's global batches."""

    @property
    def identity(self) -> Identity:
        """What decides its order."""

    @property
    def fitted(self) -> Fitted:
        """All its samples, numbered from 0 in index order."""

    def start(self, epoch: int = 0, first_pass: int = 0) -> Cursors:
        """The cursors of an epoch's first window.

        Args:
            epoch: which.
            first_pass: of the sources, where shards are indexed as the run goes on.
        """

    def ref(self, number: int) -> SampleRef:
        """What a worker needs of a sample, by its number in the plan."""

    def refs(self, samples: Bin) -> tuple[SampleRef, ...]:
        """What a worker needs of the samples of a bin of the plan."""

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) tokens and (n,) vision patches of samples."""

    def epoch_length(self) -> EpochLength:
        """How long an epoch is, as far as that is known."""

    def steps_until(self, epochs: int, state: DataState) -> int:
        """Global batches from a state to the end of the last of `epochs` epochs; 0 or less where
        the state stands behind it."""

    def numbers(self) -> list[tuple[str, Int64s]]:
        """(name, usable samples by their number in the plan) of each source, all indexed."""

    def index_all(self) -> None:
        """Indexes what is not indexed yet, so that `epoch_length` is exact."""

    def usable_tokens(self) -> Int64s:
        """(n,) the lengths of the usable samples that are known."""

    def probed(self, count: int, state: DataState) -> list[SampleRef]:
        """A few samples whose predicted lengths are worth a check.

        Args:
            state: where the run begins or goes on.
        """

    def summary(self) -> DataSummary:
        """The figures of the split."""

    def close(self) -> None:
        """Ends what works in the background."""


def first_epoch(split: Split) -> Iterator[PlannedBatch]:
    """The global batches of epoch 0, planned as they are asked for."""
    for batch in split.plan.walk(Position(), split.start()):
        if batch.position.epoch:
            return
        yield batch
        if batch.following.epoch:
            return


def planned_rows(windows: Iterable[Sequence[tuple[Bin, ...]]]) -> tuple[Int64s, Int64s]:
    """Planned global batches, flat.

    Args:
        windows: the global batches of each.

    Returns:
        (n,) sample numbers in the order of their bins, and the (b,) samples in each bin.
    """
    bins = [samples for batches in windows for batch in batches for samples in batch]
    sizes = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
    numbers = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=int(sizes.sum()))
    return numbers, sizes
