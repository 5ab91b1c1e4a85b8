"""A split whose samples are all known before the plan is made."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpack.data.config import DataConfig
from vlmpack.data.index.lengths import ShardBuilder
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.table import Int64s, SampleRef
from vlmpack.data.plan.batches import Cursors, Plan, Position
from vlmpack.data.plan.packers import Bin, BudgetPacker
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.splits.prepare import (
    dropped_samples,
    make_plan,
    prepare_split,
    probed_samples,
)
from vlmpack.data.splits.split import OnDropped, planned_rows
from vlmpack.data.splits.summary import DataSummary, EpochLength, summarise
from vlmpack.data.splits.survey import Survey

SUMMARY_SAMPLES = 262_144
"""Samples of an epoch that are packed for its figures at most: some 2 s."""


@dataclass(frozen=True, slots=True)
class IndexedSplit:
    """Every sample is known before the plan is made.

    Args:
        config: the split.
        fitted: its samples.
        identity: what decides its order.
        plan: its global batches.
    """

    config: DataConfig
    fitted: Fitted
    identity: Identity
    plan: Plan

    def start(self, epoch: int = 0, first_pass: int = 0) -> Cursors:
        """See Split."""
        return self.plan.cursors(epoch, 0)

    def ref(self, number: int) -> SampleRef:
        """See Split."""
        return self.fitted.table.ref(number)

    def refs(self, samples: Bin) -> tuple[SampleRef, ...]:
        """See Split."""
        return tuple(self.ref(number) for number in samples)

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """See Split."""
        table = self.fitted.table
        return table.num_tokens[numbers], table.num_patches[numbers]

    def epoch_length(self) -> EpochLength:
        """See Split."""
        size = self.plan.epoch_size
        return EpochLength(size, self.plan.num_steps(0), exact=True)

    def steps_until(self, epochs: int, state: DataState) -> int:
        """See Split."""
        return self.plan.steps_until(epochs, state.position)

    def numbers(self) -> list[tuple[str, Int64s]]:
        """See Split."""
        return [(source.name, source.numbers) for source in self.plan.sources]

    def index_all(self) -> None:
        """See Split."""

    def usable_tokens(self) -> Int64s:
        """See Split."""
        return self.fitted.table.num_tokens[self.fitted.eligible]

    def probed(self, count: int, state: DataState) -> list[SampleRef]:
        """See Split."""
        return probed_samples(self.fitted, count)

    def summary(self) -> DataSummary:
        """See Split. Rows of a long epoch are those of its first window, and so is the number of
        steps where it depends on them."""
        plan = self.plan
        whole = plan.epoch_size <= SUMMARY_SAMPLES or not isinstance(plan.packer, BudgetPacker)
        order, bins = planned_rows(
            plan.packed(Position(0, w)) for w in range(plan.num_windows if whole else 1)
        )
        if whole or plan.packer.num_batches(1) is not None:
            epoch = self.epoch_length()
        else:
            rows = plan.epoch_size * bins.size / order.size
            steps = max(1, round(rows / self.config.global_batch_size))
            epoch = EpochLength(plan.epoch_size, steps, exact=False)
        return summarise(
            [self.fitted],
            num_shards=len(self.fitted.table.shards),
            epoch=epoch,
            tokens=self.fitted.table.num_tokens[order],
            bins=bins,
        )

    def close(self) -> None:
        """See Split."""


def open_indexed(
    config: DataConfig,
    survey: Survey,
    builder: ShardBuilder,
    settings: BuildSettings,
    on_dropped: OnDropped,
) -> IndexedSplit:
    """Indexes every shard and plans.

    Raises:
        DataError, EmptyDataError: see prepare_split.
    """
    prepared = prepare_split(config, survey, builder, settings)
    plan, packing = make_plan(config, prepared.fitted, survey.shuffle)
    on_dropped(dropped_samples(prepared.fitted))
    identity = {**prepared.identity, **packing}
    return IndexedSplit(config, prepared.fitted, identity, plan)
