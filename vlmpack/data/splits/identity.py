"""What decides the order of a split, in readable form, for the state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from vlmpack.data.config import DataConfig
from vlmpack.data.plan.batches import Shuffle
from vlmpack.data.plan.state import Identity, IdentityValue
from vlmpack.encode import Encoder

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
        rule: of the plan.
        lengths: what the lengths are, or what makes them.
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
    """What an identity calls the share of `data.train` that is held back; no source's name has
    these brackets.

    Args:
        key: of the split that lacks it, or is it.
    """
    return f"{key}.(validation)"


def short_digest(text: str) -> str:
    """16 hex digits that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
