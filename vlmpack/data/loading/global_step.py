"""What one rank gets of one global batch."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.loading.read import SkippedSample
from vlmpack.data.plan.batches import PlannedBatch
from vlmpack.data.plan.state import DataState


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """One global batch, as one rank sees it.

    Args:
        epoch: counted from 0.
        batch: the run's global batch, counted from 0.
        num_samples: planned in it, over all ranks, holes included.
        num_rows: bins planned in it, over all ranks, none of them empty.
        imbalance: the largest cost of a rank over the mean, as planned.
        micro_batches: this rank's share; every rank has equally many, some perhaps empty.
        state: of the run after this batch.
    """

    epoch: int
    batch: int
    num_samples: int
    num_rows: int
    imbalance: float
    micro_batches: tuple[MicroBatch, ...]
    state: DataState

    @property
    def names(self) -> list[list[str]]:
        """The samples of each micro-batch, as messages name them."""
        return [
            [f"{sample.key} ({sample.shard})" for sample in micro_batch.samples]
            for micro_batch in self.micro_batches
        ]

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """The holes in this rank's micro-batches."""
        return tuple(hole for micro_batch in self.micro_batches for hole in micro_batch.skipped)


def step_of(
    planned: PlannedBatch, before: DataState, share: tuple[MicroBatch, ...], imbalance: float
) -> GlobalStep:
    """A global batch of the plan, loaded.

    Args:
        planned: for all ranks.
        before: the state of the run before it.
        share: this rank's micro-batches.
        imbalance: as planned.
    """
    following = planned.following
    after = DataState(
        epoch=following.epoch,
        window=following.window,
        batch=following.batch,
        batches=before.batches + 1,
        cursors=planned.cursors,
        eras=before.eras,
        shards=planned.shards,
    )
    return GlobalStep(
        epoch=planned.position.epoch,
        batch=before.batches,
        num_samples=planned.num_samples,
        num_rows=len(planned.bins),
        imbalance=imbalance,
        micro_batches=share,
        state=after,
    )
