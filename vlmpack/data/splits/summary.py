"""The figures of a split for people to read before training, and the identity of its order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.batches import Shuffle
from vlmpack.data.plan.state import Identity, IdentityValue
from vlmpack.data.shards.keys import count_keys
from vlmpack.encode import Encoder

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


def fewest_samples(bins: Int64s) -> int:
    """Samples that 19 of 20 rows hold at least; 0 without a row."""
    return int(np.percentile(bins, 5, method="lower")) if bins.size else 0


def summarise(
    fitted: Sequence[Fitted],
    *,
    num_shards: int,
    epoch: EpochLength,
    tokens: Int64s,
    bins: Int64s,
) -> DataSummary:
    """The figures of a split.

    Args:
        fitted: its known samples, after the over-long policy.
        tokens: (n, k) of the sequences of the planned samples, in plan order.
        bins: (b,) samples in each of their bins, in plan order.
    """
    good = [np.flatnonzero(one.eligible & ~one.table.bad) for one in fitted]

    def column(name: str) -> Int64s:
        pairs = zip(fitted, good, strict=True)
        columns = [getattr(one.table, name)[rows] for one, rows in pairs]
        return np.concatenate([np.empty(0, np.int64), *columns])

    lengths, image_tokens = column("num_tokens"), column("num_image_tokens")
    faults = Counter(kind for one in fitted for kind, _ in one.table.faults.values())
    padded, packed = count_slots(tokens.reshape(-1), bins * tokens.shape[1])
    return DataSummary(
        num_shards=num_shards,
        num_indexed=sum(len(one.table.shards) for one in fitted),
        num_samples=sum(one.num_samples for one in fitted),
        num_usable=int(lengths.size),
        num_dropped=sum(len(one.dropped) for one in fitted),
        num_shrunk=sum(len(one.table.shrunk) for one in fitted),
        num_bad=dict(sorted(faults.items())),
        num_without_image=int(lengths.size - np.count_nonzero(image_tokens)),
        num_tokens=int(lengths.sum()),
        num_image_tokens=int(image_tokens.sum()),
        num_label_tokens=int(column("num_label_tokens").sum()),
        length_percentiles={
            percent: int(np.percentile(lengths, percent, method="nearest")) if lengths.size else 0
            for percent in PERCENTILES
        },
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
    if config.groups_images:
        identity["data.group_by"] = config.data.group_by
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
