"""The figures of a split for people to read before training, and the identity of its order.

Checks stop a run before its first batch, and warnings say the rest. An epoch's draws of each
weighted source are here too.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.table import Fitted, Int64s, SampleTable
from vlmpack.data.loading.read import SampleReader, SkippedSample
from vlmpack.data.plan.batches import Shuffle, draws_per_source
from vlmpack.data.plan.state import Identity, IdentityValue
from vlmpack.data.shards.naming import count_keys, describe_keys
from vlmpack.encode import Encoder
from vlmpack.encode.rollouts import READINGS, refuse_reading
from vlmpack.errors import DataError, EmptyDataError, schema_error
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.words import counted

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """The figures of one split, or of the part of it that is indexed when the run starts.

    Args:
        num_indexed: the shards that the figures are taken from.
        num_samples: in these, bad samples included.
        num_usable: samples that an epoch can train on.
        num_dropped: over-long samples that the plan leaves out.
        num_shrunk: samples whose images are made smaller to fit.
        num_bad: error class -> samples already known to be bad; they stay as holes.
        num_tokens, num_image_tokens, num_label_tokens: of the usable samples, once each.
        length_percentiles: percentile -> tokens, of the usable samples; 0 where there is none.
        epoch_samples, epoch_steps: draws and global batches of an epoch.
        epoch_is_exact: whether these two are counted. Else steps are estimated from the first
            window, and samples from the sizes of shards that are not indexed.
        num_rows: micro-batches of the first epoch. This and the next figures cover the first window
            alone where not every shard is indexed or rows of a long epoch are planned.
        row_samples: draws in these.
        epoch_tokens: tokens of these draws.
        padded_slots: slots of the first epoch's micro-batches in mode `none`, each padded to its
            longest sample.
        packed_slots: slots of the same micro-batches as packed rows, without alignment.
        unknown_keys: keys of the records that are not read -> records.
        fewest_row_samples: samples that 19 of 20 rows hold at least.
        first_fault: the first bad sample and why, for the log alone.
    """

    num_shards: int
    num_indexed: int
    num_samples: int
    num_usable: int
    num_dropped: int
    num_shrunk: int
    num_bad: dict[str, int]
    num_without_image: int
    num_tokens: int
    num_image_tokens: int
    num_label_tokens: int
    length_percentiles: dict[int, int]
    epoch_samples: int
    epoch_steps: int
    epoch_is_exact: bool
    num_rows: int
    row_samples: int
    epoch_tokens: int
    padded_slots: int
    packed_slots: int
    unknown_keys: dict[str, int]
    fewest_row_samples: int = 0
    first_fault: str = ""

    @property
    def padding_removed(self) -> int:
        """Slots that packing saves in the first epoch."""
        return self.padded_slots - self.packed_slots


@dataclass(frozen=True, slots=True)
class EpochLength:
    """How long an epoch is: draws, and global batches with a perhaps short last one, counted or
    estimated."""

    num_samples: int
    num_steps: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the good samples of some spans.

    Args:
        by_tokens: (longest + 1,) samples of each length in tokens.
    """

    by_tokens: Int64s
    num_without_image: int
    num_image_tokens: int
    num_label_tokens: int
    num_patches: int

    @classmethod
    def of(cls, spans: Iterable[tuple[SampleTable, Int64s]]) -> Totals:
        """Over samples of tables, whose numbers ascend, a span at a time."""
        lengths, sums = np.zeros(1, np.int64), np.zeros(4, np.int64)
        for table, numbers in spans:
            first, size = int(numbers[0]) if numbers.size else 0, numbers.size
            without_gaps = bool(size) and int(numbers[-1]) - first + 1 == size
            rows = slice(first, first + size) if without_gaps else numbers  # read faster
            counts = np.bincount(table.num_tokens[rows], minlength=lengths.size)
            counts[: lengths.size] += lengths
            lengths, images = counts, table.num_image_tokens[rows]
            others = (table.num_label_tokens[rows], table.num_patches[rows])
            sums += [np.count_nonzero(images == 0), images.sum(), *(each.sum() for each in others)]
        return cls(lengths, *sums.tolist())

    @property
    def num_samples(self) -> int:
        """Samples in them."""
        return int(self.by_tokens.sum())

    @property
    def num_tokens(self) -> int:
        """Their tokens."""
        return int(self.by_tokens @ np.arange(self.by_tokens.size))

    def percentiles(self, percents: Sequence[float]) -> dict[Any, int]:
        """Percent -> tokens of the sample nearest to it; empty without samples.

        The places are those of `numpy.percentile(..., method="nearest")`.
        """
        ends = np.cumsum(self.by_tokens)
        if not ends[-1]:
            return {}
        places = np.around((ends[-1] - 1) * (np.asarray(percents) / 100)).astype(np.int64)
        values = np.searchsorted(ends, places, side="right").tolist()
        return dict(zip(percents, values, strict=True))


def fewest_samples(bins: Int64s) -> int:
    """Samples that 19 of 20 rows hold at least; 0 without a row."""
    return int(np.percentile(bins, 5, method="lower")) if bins.size else 0


def summarise(
    fitted: Sequence[Fitted], *, num_shards: int, epoch: EpochLength, tokens: Int64s, bins: Int64s
) -> DataSummary:
    """The figures of a split.

    Args:
        fitted: its known samples, after the over-long policy.
        tokens: (n, k) of the sequences of the planned samples, in plan order.
        bins: (b,) samples in each of their bins, in plan order.
    """
    totals = Totals.of((one.table, span) for one in fitted for span in one.good())
    faults = Counter(kind for one in fitted for kind, _ in one.table.faults.values())
    padded, packed = count_slots(tokens.reshape(-1), bins * tokens.shape[1])
    return DataSummary(
        num_shards=num_shards,
        num_indexed=sum(len(one.table.shards) for one in fitted),
        num_samples=sum(one.num_samples for one in fitted),
        num_usable=totals.num_samples,
        num_dropped=sum(len(one.dropped) for one in fitted),
        num_shrunk=sum(len(one.table.shrunk) for one in fitted),
        num_bad=dict(sorted(faults.items())),
        num_without_image=totals.num_without_image,
        num_tokens=totals.num_tokens,
        num_image_tokens=totals.num_image_tokens,
        num_label_tokens=totals.num_label_tokens,
        length_percentiles=dict.fromkeys(PERCENTILES, 0) | totals.percentiles(PERCENTILES),
        epoch_samples=epoch.num_samples,
        epoch_steps=epoch.num_steps,
        epoch_is_exact=epoch.exact,
        num_rows=int(bins.size),
        row_samples=tokens.shape[0],
        epoch_tokens=int(tokens.sum()),
        padded_slots=padded,
        packed_slots=packed,
        unknown_keys=count_keys(one.table.unknown_keys for one in fitted),
        fewest_row_samples=fewest_samples(bins),
        first_fault=first_fault([one.table for one in fitted]),
    )


def share_words(config: DataConfig, fitted: Fitted, unit: str = "samples") -> str:
    """The share of `data.train` that validation holds back, in words."""
    whole, own = fitted.table.num_samples, fitted.num_samples
    held = own if config.key == "data.validation" else whole - own
    return (
        f"{config.share} of data.train: {held:,} of {whole:,} {unit} are held back and never "
        "trained, by what they ask (images, or words up to the first answer)"
    )


def count_slots(lengths: Int64s, bins: Int64s) -> tuple[int, int]:
    """(slots when every bin is padded to its longest sequence, slots when it is packed).

    Args:
        lengths: (n,) tokens of each sequence in plan order; 0 for a hole.
        bins: (b,) sequences in each bin, in order; they sum to n.
    """
    if not bins.size:
        return 0, 0
    starts = np.concatenate(([0], np.cumsum(bins)))[:-1]
    longest = np.maximum.reduceat(lengths, starts)
    rows = np.add.reduceat((lengths > 0).astype(np.int64), starts)
    return int((longest * rows).sum()), int(lengths.sum())


MAX_SOURCES_LISTED = 6


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
        contents: per source, its size in words and a digest of what it holds.
    """
    identity: dict[str, IdentityValue] = {
        "plan": rule,
        "data.seed": config.training.seed,
        "data.shuffle": shuffle,
        "data.over_long": config.data.over_long,
        "data.epoch_size": config.epoch_size,
        "packing.mode": config.mode.name,
        "training.seq_length": config.training.seq_length,
        "training.global_batch_size": config.training.global_batch_size,
        "encoder": short_digest(encoder.fingerprint),
        "lengths": lengths,
    }
    if config.group_by != "none":
        identity["data.group_by"] = config.group_by
    if config.share is not None:
        identity[share_name(config.key)] = str(config.share)
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


def share_name(key: str) -> str:
    """An identity's name for the held-back share of `data.train`. No source's name has these
    brackets."""
    return f"{key}.(validation)"


def short_digest(text: str) -> str:
    """16 hex digits that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
            f"{describe_keys(table.unknown_keys)}. Remove them, or set data.unknown_keys: report",
            shard=table.shards[0].path if len(table.shards) == 1 else None,
        )


def name_unknown_keys(counts: Mapping[str, Mapping[str, int]]) -> None:
    """Log the unknown keys of each split's records, if there are any; in one line where they are
    the same."""
    splits: dict[str, list[str]] = {}
    for key, each in counts.items():
        if each:
            splits.setdefault(describe_keys(each), []).append(key)
    for said, keys in splits.items():
        where = "" if keys == ["data.train"] else f" in {' and '.join(keys)}"
        text = "%-14s not read%s: %s (data.unknown_keys: refuse would stop)"
        logger.warning(text, "unknown keys", where, said)


def check_rollouts(table: SampleTable, objective: ObjectiveSection) -> None:
    """Refuses rollouts that the objective cannot learn from, and one that is there twice.

    Raises:
        DataError: (schema) with the first of them, or both.
    """
    columns = table.rollouts
    if columns is None:
        return
    usable, readings = columns.known & ~table.bad, columns.readings[:]
    for place in np.unique(readings[usable]).tolist():
        knobs = {"old": objective.old, "correction": objective.correction}
        if (fault := refuse_reading(READINGS[place], **knobs)) is not None:
            such = np.flatnonzero(usable & (readings == place))
            more = f" ({such.size:,} of {table.num_samples:,} samples)"
            raise table.ref(int(such[0])).located(fault.reworded(fault.reason + more))
    if (twice := columns.repeated()) is not None:
        first, second = map(table.ref, twice)
        raise second.located(
            schema_error(
                "another record's rollout has the same policy_version, group and number: "
                f"{first.key!r} of {first.shard}. Expected each drawn answer once. Leave one of "
                "the two out, or give it a number of its own"
            )
        )


def check_not_empty(fitted: Sequence[Fitted], config: DataConfig) -> None:
    """Refuses a split without a usable sample, and a share that leaves either side without one.

    Raises:
        EmptyDataError: with what there is instead.
    """
    empty = not any(span.size for one in fitted for span in one.good())
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
        f"{config.training.seq_length}{first_fault(tables)}"
    )


def _check_sides(fitted: Sequence[Fitted], config: DataConfig, *, empty: bool) -> None:
    """Refuse a share for validation that leaves one of the two splits without a usable sample."""
    whole = sum(one.table.num_samples for one in fitted)
    own, is_held = sum(one.num_samples for one in fitted), config.key == "data.validation"
    held = own if is_held else whole - own
    if not empty and 0 < held < whole:
        return
    what, change = "leaves no usable one to be trained", "Lower the share"
    if held == 0 or (empty and is_held):
        what, change = "holds back no usable one; expected at least one", "Raise the share"
    raise EmptyDataError(
        f"data.validation: {config.share} of the {counted(whole, 'sample')} of data.train {what}. "
        "Records with the same images, or without images the same words up to the first answer, "
        f"are on one side. {change}, or name files of their own for validation"
    )


def first_fault(tables: Sequence[SampleTable]) -> str:
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
