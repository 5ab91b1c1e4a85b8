"""From a DataConfig to the samples of a split and their plan: index, lengths, policy, probe."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
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
from vlmpack.data.index.table import Int64s, SampleRef, SampleTable, join_tables
from vlmpack.data.loading.read import SampleReader, SkippedSample
from vlmpack.data.plan.batches import PLAN_RULE, Plan, PlanSource, Shuffle
from vlmpack.data.plan.state import Identity, IdentityValue
from vlmpack.data.protocols import Encoder
from vlmpack.data.shards.keys import describe_keys
from vlmpack.data.splits.blending import blended_draws
from vlmpack.data.splits.row_packer import cut_indexed
from vlmpack.data.splits.survey import Survey
from vlmpack.errors import DataError, EmptyDataError
from vlmpack.storage.fetch import Fetcher

logger = logging.getLogger("vlmpack")

MAX_SOURCES_LISTED = 6

PROBE_SECONDS = 3.0
MIN_PROBED = 16


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
    table = join_tables(joined)
    check_faults(table, config)
    check_unknown_keys(table, config)
    rows = _Rows(table, [index for indexes, _ in joined for index in indexes], builder.fetcher)
    fitted = apply_over_long(
        table,
        policy=config.over_long,
        limits=config.limits,
        encoder=builder.lengths.encoder,
        read_text=rows.read_text,
    )
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Index rows by sample number, for the few samples that need their text again."""

    table: SampleTable
    indexes: list[ShardIndex]
    fetcher: Fetcher

    def read_text(self, number: int) -> SampleText:
        shard = self.table.shard_of(number)
        index = self.indexes[shard]
        place = number - int(self.table.shard_starts[shard])
        row: dict[str, Any] = index.table.slice(place, 1).to_pylist()[0]
        return read_text(self.fetcher, index.stamp, row)


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

    cutting = cut_indexed(config, sources, shuffle, token_counts)
    plan = Plan(
        sources,
        seed=config.seed,
        shuffle=shuffle,
        window=cutting.window,
        packer=cutting.packer,
    )
    return plan, cutting.identity


def probed_samples(fitted: Fitted, count: int) -> list[SampleRef]:
    """A few good samples, spread over the split, and some of those that the plan shrank."""
    usable = np.flatnonzero(fitted.eligible & ~fitted.table.bad)
    places = np.linspace(0, usable.size - 1, num=min(count, usable.size)).astype(np.int64)
    spread = usable[places].tolist()
    return [fitted.table.ref(n) for n in sorted({*spread, *list(fitted.table.shrunk)[:count]})]


def probe_lengths(
    config: DataConfig, refs: Sequence[SampleRef], reader: SampleReader, encoder: Encoder
) -> int:
    """Encodes some samples and compares with the predicted lengths.

    It ends after PROBE_SECONDS, having compared at least MIN_PROBED: large images take long, and
    the loader compares every sample again when it is used.

    Args:
        refs: spread over the split.

    Returns:
        How many were compared (bad ones that the policy skips do not count).

    Raises:
        DataError: the first sample whose encoded length is not the predicted one; or one that is
            bad, where its class is not skipped.
    """
    compared, deadline = 0, time.monotonic() + PROBE_SECONDS
    stride = -(-len(refs) // MIN_PROBED) or 1
    for ref in (ref for start in range(stride) for ref in refs[start::stride]):
        if compared >= MIN_PROBED and time.monotonic() > deadline:
            break
        try:
            encoded = encoder.encode(reader.read(ref), ref.sizes)
        except DataError as error:
            if config.on_error.skips(error.error_class):
                continue
            raise error.located(key=ref.key, shard=ref.shard, offset=ref.offset) from None
        compared += 1
        if encoded.length != ref.num_tokens:
            raise DataError(
                f"the length probe predicted {ref.num_tokens} tokens, encoding gave "
                f"{encoded.length}; the model family's length rule does not fit this processor",
                error_class="integrity",
                key=ref.key,
                shard=ref.shard,
                offset=ref.offset,
            )
    return compared


def dropped_samples(fitted: Fitted) -> list[SkippedSample]:
    """The over-long samples that the plan leaves out, for the ledger."""
    refs = [(fitted.table.ref(item.number), item.reason) for item in fitted.dropped]
    return [
        SkippedSample(ref.number, ref.key, ref.shard, ref.offset, "too_long", reason)
        for ref, reason in refs
    ]


def check_faults(table: SampleTable, config: DataConfig) -> None:
    """Stops before training where a sample is already known to be bad and may not be skipped."""
    for number, (name, _) in sorted(table.faults.items()):
        try:
            SampleReader.raise_known(table.ref(number))
        except DataError as error:
            if config.on_error.skips(error.error_class):
                continue
            same = sum(kind == name for kind, _ in table.faults.values())
            more = f" ({same - 1} more samples have errors of this class)" if same > 1 else ""
            raise DataError(
                f"{error.reason}{more}; repair the data, or set data.on_error.{name}: skip",
                error_class=error.error_class,
                key=error.key,
                shard=error.shard,
                offset=error.offset,
            ) from None


def check_unknown_keys(table: SampleTable, config: DataConfig) -> None:
    """Stops where records have keys that are not read, and the recipe refuses them."""
    if table.unknown_keys and config.unknown_keys == "refuse":
        raise DataError(
            f"{config.key}: records have keys that are not read: "
            f"{describe_keys(table.unknown_keys)}; remove them, or set data.unknown_keys: report",
            error_class="schema",
            shard=table.shards[0].path if len(table.shards) == 1 else None,
        )


def name_unknown_keys(counts: Mapping[str, int], key: str = "data.train") -> None:
    """One line in the log, where there are any.

    Args:
        counts: keys of records that are not read -> records.
        key: the split's.
    """
    if counts:
        logger.warning(
            "%-14s keys of records that are not read%s: %s (data.unknown_keys: refuse would stop)",
            "unknown keys",
            "" if key == "data.train" else f" in {key}",
            describe_keys(counts),
        )


def check_not_empty(fitted: Sequence[Fitted], config: DataConfig) -> None:
    """Refuses a split without a usable sample.

    Args:
        fitted: all its samples.

    Raises:
        EmptyDataError: with what there is instead.
    """
    if any((one.eligible & ~one.table.bad).any() for one in fitted):
        return
    patterns = ", ".join(repr(path) for source in config.sources for path in source.paths)
    tables = [one.table for one in fitted]
    raise EmptyDataError(
        f"{config.key}: no usable sample in {patterns}: "
        f"{sum(table.num_samples for table in tables)} samples in "
        f"{sum(len(table.shards) for table in tables)} shards, of which "
        f"{sum(int(table.bad.sum()) for table in tables)} are bad and "
        f"{sum(len(one.dropped) for one in fitted)} are longer than training.seq_length "
        f"{config.seq_length}"
    )


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


def split_identity(
    config: DataConfig,
    shuffle: Shuffle,
    encoder: Encoder,
    *,
    rule: str,
    lengths: str,
    contents: Sequence[tuple[str, str]],
) -> Identity:
    """What decides the order, readable; many sources are folded into one digest.

    Args:
        rule: of the plan.
        lengths: what the lengths are, or what makes them.
        contents: per source, its size in words and a digest of what it holds.
    """
    identity: dict[str, IdentityValue] = {
        "plan": rule,
        "data.seed": config.seed,
        "data.shuffle": shuffle,
        "data.over_long": config.over_long,
        "data.epoch_size": config.epoch_size,
        "packing.mode": config.mode,
        "training.seq_length": config.seq_length,
        "training.global_batch_size": config.global_batch_size,
        "encoder": short_digest(encoder.fingerprint),
        "lengths": lengths,
    }
    lines = []
    for source, (size, content) in zip(config.sources, contents, strict=True):
        weight = "" if source.weight is None else f", weight {source.weight!r}"
        weight += " of the tokens" if config.weights == "tokens" else ""
        name = source.name
        if len(name) > 40:
            name = f"{name[:23]}-{short_digest(name)}"
        lines.append((name, f"{size}{weight}, {content}"))
    if len(lines) > MAX_SOURCES_LISTED:
        identity[config.key] = f"{len(lines)} sources, {short_digest(repr(lines))}"
    else:
        identity.update({f"{config.key}.{name}": text for name, text in lines})
    return identity


def short_digest(text: str) -> str:
    """16 hex digits that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
