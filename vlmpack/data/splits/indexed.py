"""A split whose samples are all known before the plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.lengths import (
    SampleText,
    ShardBuilder,
    lengths_digest,
    open_lengths,
    read_text,
)
from vlmpack.data.index.overlong import Fitted, apply_over_long
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import ShardIndex, open_index
from vlmpack.data.index.table import Int64s, SampleRef, join_tables
from vlmpack.data.plan.batches import (
    PLAN_RULE,
    Cursors,
    Plan,
    PlanSource,
    Position,
    Shuffle,
    dry_run_order,
)
from vlmpack.data.plan.packers import Bin
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.splits.blending import blended_draws
from vlmpack.data.splits.checks import (
    check_faults,
    check_not_empty,
    check_unknown_keys,
    dropped_samples,
)
from vlmpack.data.splits.identity import short_digest, split_identity
from vlmpack.data.splits.length_probe import probed_samples
from vlmpack.data.splits.split import OnDropped, planned_rows
from vlmpack.data.splits.summary import DataSummary, EpochLength, summarise
from vlmpack.data.splits.survey import Survey
from vlmpack.encode import Encoder
from vlmpack.errors import EmptyDataError

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
        whole = plan.epoch_size <= SUMMARY_SAMPLES or not self.config.mode.facts.plans_rows
        order, bins = planned_rows(
            plan.packed(Position(0, w)) for w in range(plan.num_windows if whole else 1)
        )
        if whole or plan.packer.num_batches(1) is not None:
            epoch = self.epoch_length()
        else:
            rows = plan.epoch_size * bins.size / order.size
            steps = max(1, round(rows / self.config.training.global_batch_size))
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


@dataclass(frozen=True, slots=True)
class PreparedSplit:
    """A split that is ready to be planned.

    Args:
        fitted: its samples and which of them may be used.
        identity: what decides its order, for the state.
    """

    fitted: Fitted
    identity: Identity


def prepare_split(
    config: DataConfig, survey: Survey, builder: ShardBuilder, settings: BuildSettings
) -> PreparedSplit:
    """Indexes what is new, measures what is new, applies the policies.

    Raises:
        DataError: a damaged shard; a bad sample whose class is not skipped; an over-long sample.
        EmptyDataError: nothing to train on.
    """
    joined = _open_sources(survey, builder, settings)
    fitted = fit_samples(config, builder, joined)
    check_not_empty([fitted], config)
    return PreparedSplit(fitted, _identity(config, survey, builder.lengths.encoder, joined))


def _open_sources(
    survey: Survey, builder: ShardBuilder, settings: BuildSettings
) -> list[tuple[Sequence[ShardIndex], Sequence[Any]]]:
    """Indexes and lengths of each source; all are opened together, from one file of each kind."""
    stamps = [stamp for source in survey.sources for stamp in source]
    indexes = open_index(stamps, builder, settings)
    lengths = open_lengths(indexes, builder.lengths, settings)
    ends = list(accumulate(map(len, survey.sources), initial=0))
    return [(indexes[a:b], lengths[a:b]) for a, b in pairwise(ends)]


def fit_samples(
    config: DataConfig,
    builder: ShardBuilder,
    joined: Sequence[tuple[Sequence[ShardIndex], Sequence[Any]]],
) -> Fitted:
    """The samples of some shards, by the recipe's policies.

    Args:
        joined: indexes and lengths of each source's shards.

    Raises:
        DataError: a bad sample whose class is not skipped; an over-long sample.
    """
    table = join_tables(joined)
    check_faults(table, config)
    check_unknown_keys(table, config)
    shards = [index for indexes, _ in joined for index in indexes]

    def text_again(number: int) -> SampleText:
        shard = table.shard_of(number)
        place = number - int(table.shard_starts[shard])
        row: dict[str, Any] = shards[shard].table.slice(place, 1).to_pylist()[0]
        return read_text(builder.fetcher, shards[shard].stamp, row)

    return apply_over_long(
        table,
        policy=config.data.over_long,
        limits=config.limits,
        encoder=builder.lengths.encoder,
        read_text=text_again,
    )


def make_plan(config: DataConfig, fitted: Fitted, shuffle: Shuffle) -> tuple[Plan, Identity]:
    """The plan of a split whose samples are all known, and what its packing adds to the identity.

    Raises:
        EmptyDataError: a source with weight and without a usable sample.
    """
    assert shuffle != "window"
    table = fitted.table
    bounds = [
        (int(table.source_starts[d]), int(table.source_starts[d + 1]))
        for d in range(len(config.sources))
    ]
    numbers = [np.flatnonzero(fitted.eligible[a:b]).astype(np.int64) + a for a, b in bounds]
    sizes = [chosen.shape[0] for chosen in numbers]
    draws: Sequence[int] = sizes
    if config.weighted:
        tokens = [int(table.num_tokens[chosen].sum()) for chosen in numbers]
        contents = list(zip(sizes, tokens, strict=True))
        draws = blended_draws(config, config.epoch_size or sum(sizes), contents)
    sources = []
    for d, source in enumerate(config.sources):
        if draws[d] and not sizes[d]:
            raise EmptyDataError(
                f"{config.key}.{source.name}: no usable sample, but its weight is {source.weight}"
            )
        sources.append(PlanSource(source.name, numbers[d], draws[d]))

    def token_counts(order: Int64s) -> tuple[Int64s, Int64s]:
        return table.num_tokens[order], table.num_patches[order]

    def first_samples() -> Int64s:
        return dry_run_order(sources, config.training.seed, shuffle)

    cutting = config.mode.cut(config.uncut(token_counts, first_samples))
    plan = Plan(
        sources,
        seed=config.training.seed,
        shuffle=shuffle,
        window=cutting.window,
        packer=cutting.packer,
    )
    return plan, config.mode.identity(cutting)


def _identity(
    config: DataConfig,
    survey: Survey,
    encoder: Encoder,
    joined: Sequence[tuple[Sequence[ShardIndex], Sequence[Any]]],
) -> Identity:
    contents = []
    for indexes, _ in joined:
        samples = sum(index.num_samples for index in indexes)
        content = short_digest("".join(index.content for index in indexes))
        contents.append((f"{len(indexes)} shards, {samples} samples", content))
    lengths = lengths_digest([table for _, tables in joined for table in tables])[:16]
    return split_identity(
        config, survey.shuffle, encoder, rule=PLAN_RULE, lengths=lengths, contents=contents
    )
