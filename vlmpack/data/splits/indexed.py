"""A split whose samples are all known before the plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.held_out import held_out
from vlmpack.data.index.lengths import (
    SampleText,
    ShardBuilder,
    read_text,
)
from vlmpack.data.index.parts import BuildSettings, part_for
from vlmpack.data.index.shard_index import load_index
from vlmpack.data.index.table import (
    Fitted,
    GroupBy,
    Int64s,
    SampleTable,
    apply_over_long,
    chosen,
    table_of,
)
from vlmpack.data.index.table_file import open_table
from vlmpack.data.plan.batches import (
    DRY_RUN_SAMPLES,
    PLAN_RULE,
    Plan,
    PlanSource,
    Shuffle,
    dry_run_order,
)
from vlmpack.data.plan.packers import FixedPacker, planned_samples
from vlmpack.data.plan.state import Identity
from vlmpack.data.splits.split import KnownSplit, OnDropped
from vlmpack.data.splits.summary import (
    Totals,
    blended_draws,
    check_faults,
    check_not_empty,
    check_rollouts,
    check_unknown_keys,
    dropped_samples,
    short_digest,
    split_identity,
)
from vlmpack.data.splits.survey import Survey, index_folder
from vlmpack.encode import Encoder
from vlmpack.errors import EmptyDataError


def open_indexed(
    config: DataConfig,
    survey: Survey,
    builder: ShardBuilder,
    settings: BuildSettings,
    on_dropped: OnDropped,
) -> KnownSplit:
    """Indexes every shard and plans.

    Raises:
        DataError, EmptyDataError: see prepare_split.
    """
    prepared = prepare_split(config, survey, builder, settings)
    plan, packing = make_plan(config, prepared.fitted, survey.shuffle)
    on_dropped(dropped_samples(prepared.fitted))
    identity = {**prepared.identity, **packing}
    return KnownSplit(config, prepared.fitted, identity, plan)


@dataclass(frozen=True, slots=True)
class PreparedSplit:
    """A split that is ready to be planned, and the identity that decides its order."""

    fitted: Fitted
    identity: Identity


def prepare_split(
    config: DataConfig, survey: Survey, builder: ShardBuilder, settings: BuildSettings
) -> PreparedSplit:
    """Index and measure what is new, and apply the policies.

    Raises:
        DataError: a damaged shard, a bad sample whose class is not skipped, or an over-long sample.
        EmptyDataError: nothing to train on.
    """
    stamps = [stamp for source in survey.sources for stamp in source]
    table = table_of(open_table(stamps, builder, settings), survey.sources)
    fitted = fit_samples(config, builder, table)
    check_rollouts(table, config.objective)
    check_not_empty([fitted], config)
    return PreparedSplit(fitted, _identity(config, survey, builder.lengths.encoder, table))


def fit_samples(config: DataConfig, builder: ShardBuilder, table: SampleTable) -> Fitted:
    """The samples of some shards, by the recipe's policies.

    Raises:
        DataError: a bad sample whose class is not skipped; an over-long sample.
    """
    check_faults(table, config)
    check_unknown_keys(table, config)

    @lru_cache(1)  # over-long samples come in order
    def rows_of(shard: int) -> Any:
        part = part_for(builder.lengths.index_dir, table.shards[shard], builder.rule)
        return load_index(part, builder).table

    def text_again(number: int) -> SampleText:
        shard = table.shard_of(number)
        place = number - int(table.shard_starts[shard])
        row: dict[str, Any] = rows_of(shard).slice(place, 1).to_pylist()[0]
        return read_text(builder, table.shards[shard], row)

    fitted = apply_over_long(
        table,
        policy=config.data.over_long,
        limits=config.limits,
        encoder=builder.lengths.encoder,
        read_text=text_again,
    )
    if config.share is None:
        return fitted
    held = held_out(table.openings, config.share.fraction)
    return fitted.only(held if config.key == "data.validation" else ~held)


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
    numbers = [chosen(fitted.eligible[a:b], a) for a, b in bounds]
    sizes = [chosen.shape[0] for chosen in numbers]
    draws: Sequence[int] = sizes
    if config.weighted:
        totals = [Totals.of((table, span) for span in fitted.good(*each)) for each in bounds]
        contents = list(zip(sizes, (total.num_tokens for total in totals), strict=True))
        draws = blended_draws(config, config.epoch_size or sum(sizes), contents)
    sources = []
    for d, source in enumerate(config.sources):
        if draws[d] and not sizes[d]:
            raise EmptyDataError(
                f"{config.key}.{source.name}: no usable sample, but its weight is {source.weight}"
            )
        sources.append(PlanSource(source.name, numbers[d], draws[d]))

    uncut = Plan(
        sources,
        seed=config.training.seed,
        shuffle=shuffle,
        window=DRY_RUN_SAMPLES,
        packer=FixedPacker(1, 1),
        groups=sample_groups(table, config.group_by),
        in_turn=config.keeps_turns,
        folder=index_folder(config),
    )
    first_samples = partial(dry_run_order, uncut)
    planned = None if table.prefixes is None else partial(planned_samples, table)
    cutting = config.mode.cut(
        config.uncut(table.sizes, first_samples, table.aligned_sizes, planned)
    )
    plan = replace(uncut, window=cutting.window, packer=cutting.packer)
    return plan, config.mode.identity(cutting)


def sample_groups(table: SampleTable, by: GroupBy) -> Int64s | None:
    """(N,) the group of each sample, named after the group's first sample. None if all are alone.

    The branches of a record form a group. So do samples of one source that stand together.
    """
    if table.branches is None and table.digests(by) is None:
        return None
    spans = list(pairwise(table.source_starts.tolist()))
    by_source = [table.groups(np.arange(a, b, dtype=np.int64), by) for a, b in spans]
    groups = [group for group in by_source if group is not None]
    return np.concatenate(groups) if groups else None


def _identity(
    config: DataConfig,
    survey: Survey,
    encoder: Encoder,
    table: SampleTable,
) -> Identity:
    contents, first = [], 0
    for d, source in enumerate(survey.sources):
        stop = first + len(source)
        samples = int(table.source_starts[d + 1] - table.source_starts[d])
        content = short_digest("".join(table.contents[first:stop]))
        contents.append((f"{len(source)} shards, {samples} samples", content))
        first = stop
    lengths, objects = table.lengths_digest[:16], table.objects
    identity = split_identity(
        config, survey.shuffle, encoder, rule=PLAN_RULE, lengths=lengths, contents=contents
    )
    return {**identity, "objects": objects} if objects else identity
