"""Checks that stop a run before its first batch, warnings about the rest, and an epoch's draws of
each weighted source."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction

from vlmpack.data.config import DataConfig
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.table import SampleTable
from vlmpack.data.loading.read import SampleReader, SkippedSample
from vlmpack.data.plan.blend import draws_per_source
from vlmpack.data.shards.keys import describe_keys
from vlmpack.errors import DataError, EmptyDataError, schema_error
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")


def check_faults(table: SampleTable, config: DataConfig) -> None:
    """Stops before training where a sample is already known to be bad and may not be skipped."""
    for number, (name, _) in sorted(table.faults.items()):
        try:
            SampleReader.raise_known(table.ref(number))
        except DataError as error:
            if config.data.on_error.skips(error.error_class):
                continue
            same = sum(kind == name for kind, _ in table.faults.values())
            more = f" ({same - 1} more samples have errors of this class)" if same > 1 else ""
            raise error.reworded(
                f"{error.reason}{more}; repair the data, or set data.on_error.{name}: skip"
            ) from None


def check_unknown_keys(table: SampleTable, config: DataConfig) -> None:
    """Stops where records have keys that are not read, and the recipe refuses them."""
    if table.unknown_keys and config.data.unknown_keys == "refuse":
        raise schema_error(
            f"{config.key}: records have keys that are not read: "
            f"{describe_keys(table.unknown_keys)}; remove them, or set data.unknown_keys: report",
            shard=table.shards[0].path if len(table.shards) == 1 else None,
        )


def name_unknown_keys(counts: Mapping[str, int], key: str = "data.train") -> None:
    """Log unknown keys of records in one line, if there are any."""
    if counts:
        logger.warning(
            "%-14s keys of records that are not read%s: %s (data.unknown_keys: refuse would stop)",
            "unknown keys",
            "" if key == "data.train" else f" in {key}",
            describe_keys(counts),
        )


def check_not_empty(fitted: Sequence[Fitted], config: DataConfig) -> None:
    """Refuses a split without a usable sample, and a share that leaves either side without one.

    Raises:
        EmptyDataError: with what there is instead.
    """
    empty = not any((one.eligible & ~one.table.bad).any() for one in fitted)
    if config.share is not None and not all(one.table.bad.all() for one in fitted):
        _check_sides(fitted, config, empty=empty)
        return
    if not empty:
        return
    patterns = ", ".join(repr(source.path) for source in config.sources)
    tables = [one.table for one in fitted]
    raise EmptyDataError(
        f"{config.key}: no usable sample in {patterns}: "
        f"{counted(sum(table.num_samples for table in tables), 'sample')} in "
        f"{counted(sum(len(table.shards) for table in tables), 'shard')}, of which "
        f"{sum(int(table.bad.sum()) for table in tables)} are bad and "
        f"{sum(len(one.dropped) for one in fitted)} are longer than training.seq_length "
        f"{config.training.seq_length}{_first_fault(tables)}"
    )


def _check_sides(fitted: Sequence[Fitted], config: DataConfig, *, empty: bool) -> None:
    """Refuse a share for validation that leaves one of the two splits without a usable sample."""
    whole = sum(one.table.num_samples for one in fitted)
    own, is_held = sum(one.num_samples for one in fitted), config.key == "data.validation"
    held = own if is_held else whole - own
    if not empty and 0 < held < whole:
        return
    found, change = "leaves no usable one to be trained", "lower the share"
    if held == 0 or (empty and is_held):
        found, change = "holds back no usable one; expected at least one", "raise the share"
    raise EmptyDataError(
        f"data.validation: {config.share} of the {counted(whole, 'sample')} of data.train {found}. "
        "What a record asks decides (its images, or without images its words up to the first "
        f"answer), and records that ask the same are on one side; {change}, or name files of their "
        "own for validation"
    )


def _first_fault(tables: Sequence[SampleTable]) -> str:
    """The first bad sample and why, in a message behind their number; empty where none is bad."""
    for table in tables:
        for number, (_, reason) in sorted(table.faults.items())[:1]:
            return f"; the first that is bad is {table.key(number)!r}: {reason}"
    return ""


def dropped_samples(fitted: Fitted) -> list[SkippedSample]:
    """The over-long samples that the plan leaves out, for the ledger."""
    refs = [(fitted.table.ref(item.number), item.reason) for item in fitted.dropped]
    return [
        SkippedSample(ref.number, ref.key, ref.shard, ref.offset, "too_long", reason)
        for ref, reason in refs
    ]


def blended_draws(
    config: DataConfig, epoch_size: int, contents: Sequence[tuple[int, int]] | None
) -> tuple[int, ...]:
    """Draws per source, as `data.weights` has it.

    Args:
        epoch_size: draws of an epoch.
        contents: (usable samples, their tokens) of each source, only called with weights of tokens.
            A sample that is known to be bad is drawn, and has no token.

    Raises:
        EmptyDataError: a source without a token, where tokens count.
    """
    weights = [source.weight or 0.0 for source in config.sources]
    if config.weights == "samples":
        return draws_per_source(weights, epoch_size)
    assert contents is not None
    for source, (_, tokens) in zip(config.sources, contents, strict=True):
        if not tokens:
            raise EmptyDataError(
                f"{config.key}.{source.name}: no usable sample, but its weight is {source.weight}"
            )
    means = [Fraction(tokens, samples) for samples, tokens in contents]
    return draws_per_source(weights, epoch_size, means)
