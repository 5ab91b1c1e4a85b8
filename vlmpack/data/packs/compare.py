"""Whether packs fit a recipe: every difference, readable."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmpack.data.config import DataConfig
from vlmpack.data.packs.manifest import MANIFEST, Manifest
from vlmpack.data.plan.state import Identity, IdentityValue
from vlmpack.data.splits.summary import share_name
from vlmpack.encode import Encoder
from vlmpack.errors import PacksError
from vlmpack.words import indented

logger = logging.getLogger("vlmpack")

Setting = tuple[str, object, object]
"""(key, its value in the packs, its value in the recipe)."""

_PARTS = {
    "rules": "how this version encodes",
    "tokenizer": "the tokenizer in model.path",
    "template": "the chat template in model.path",
    "processor": "the image processor in model.path",
    "images": "images",
    "date": "data.date",
    "learn": "data.learn",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "special_tokens": "data.special_tokens",
    "samples": "the form of samples (objective.name)",
}
_ABSENT = {"samples": "conversations"}
"""What it means that a part is not there."""
_INDEX = ("lengths", "data.over_long", "data.epoch_size", "data.group_by")


def index_identity(identity: Identity, key: str) -> dict[str, IdentityValue]:
    """The parts of a split's identity that say which samples there are, and which stay together."""
    return {
        name: value
        for name, value in identity.items()
        if name in _INDEX or name == key or name.startswith(f"{key}.")
    }


def check_packs(manifest: Manifest, folder: Path, config: DataConfig, encoder: Encoder) -> None:
    """Refuses packs that were made for another model folder, length or budget.

    Raises:
        PacksError: with every difference.
    """
    settings = [*_budget_settings(manifest, config), *_source_settings(manifest, config)]
    lines = encoder_differences(manifest, encoder)
    lines += [
        f"{name}: {shown(before)} in the packs, {shown(now)} in the recipe"
        for name, before, now in settings
        if before != now
    ]
    lines += [*_other_sets(manifest, config), *_other_sharing(manifest, config)]
    alignment, multiple = manifest.budget.alignment, config.mode.multiples.sequence
    if alignment % multiple:
        lines.append(
            f"packing.alignment: {alignment} in the packs, but parallelism.context needs a "
            f"multiple of {multiple}"
        )
    _refuse(folder, lines)


def _other_sets(manifest: Manifest, config: DataConfig) -> list[str]:
    """Packs that are cut inside sets fit one size of set, since each is an optimizer step."""
    before, now = manifest.global_batch_size, config.training.global_batch_size
    if not manifest.in_sets or before == now:
        return []
    what = "pairs" if manifest.holds_pairs else "samples"
    return [
        f"training.global_batch_size: {before} in the packs, which are cut inside sets of {before} "
        f"{what}, {now} in the recipe; for sets of {now} pack again with "
        f"training.global_batch_size={now}"
    ]


def _other_sharing(manifest: Manifest, config: DataConfig) -> list[str]:
    """Packs depend on whether samples share prefixes in a row."""
    before, now = (
        str(shares).lower() for shares in (manifest.share_prefix, config.mode.packing.share_prefix)
    )
    if before == now:
        return []
    return [
        f"packing.share_prefix: {before} in the packs, {now} in the recipe; pack again with "
        f"packing.share_prefix={now}, or train with {before}"
    ]


def check_index(manifest: Manifest, folder: Path, identity: Identity, key: str) -> None:
    """Refuses packs whose samples are not those of the shards.

    Raises:
        PacksError: with every difference.
    """
    now = index_identity(identity, key)
    _refuse(folder, flat_differences(dict(manifest.data), now, was="in the packs"))


def encoder_differences(manifest: Manifest, encoder: Encoder) -> list[str]:
    """One line for each part of the processor that differs."""
    now = encoder.fingerprint_parts
    before = manifest.encoder
    return [
        f"{what}: {before.get(part, absent)} in the packs, {now.get(part, absent)} now"
        for part, what in _PARTS.items()
        for absent in [_ABSENT.get(part, "not set")]
        if before.get(part) != now.get(part)
    ]


def note_makers(manifest: Manifest, encoder: Encoder) -> None:
    """Say where another version of transformers than this one made the packs."""
    before, now = (said["made_with"] for said in (manifest.encoder, encoder.fingerprint_parts))
    if before != now:
        logger.warning(
            "note: packing.path: the packs were made with %s; it is %s now, whose pixels or tokens "
            "may differ",
            before,
            now,
        )


def _budget_settings(manifest: Manifest, config: DataConfig) -> Iterator[Setting]:
    """Lengths and bounds that the recipe may have otherwise."""
    yield "training.seq_length", manifest.seq_length, config.training.seq_length
    scopes = ("stream", "batch")
    now_in_sets = config.mode.packing.varies_in_rows
    yield "packing.scope", scopes[manifest.in_sets], scopes[now_in_sets]
    for key, before in manifest.budget.knobs.items():
        now = getattr(config.mode.packing, key.removeprefix("packing."))
        # Left open, a knob is as the packs have it; but no bound on patches is a choice.
        if now not in (None, "auto") or key == "packing.max_vision_patches":
            yield key, before, now
    if manifest.planner == "stream" and config.data.shuffle != "auto":
        yield "data.shuffle", manifest.shuffle, config.data.shuffle


def _source_settings(manifest: Manifest, config: DataConfig) -> Iterator[Setting]:
    """Settings of the sources that packs depend on. Paths may change."""
    yield "data.over_long", manifest.data["data.over_long"], config.data.over_long
    yield "data.epoch_size", manifest.data["data.epoch_size"], config.epoch_size
    name = share_name(config.key)
    yield "data.validation", manifest.data.get(name), config.share
    group_by = "image" if config.groups_images else "none"
    yield "data.group_by", manifest.data.get("data.group_by", "none"), group_by
    yield f"sources of {config.key}", len(manifest.sources), len(config.sources)
    yield "data.weights", manifest.weights, config.weights
    if len(manifest.sources) == len(config.sources):
        for (_, weight), source in zip(manifest.sources, config.sources, strict=True):
            yield f"{config.key}.{source.name}.weight", weight, source.weight


def flat_differences(
    before: Mapping[str, Any], now: Mapping[str, Any], *, was: str = "begun with"
) -> list[str]:
    """One readable line for each value of nested mappings that differs."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += [f"{name}.{line}" for line in flat_differences(old, new, was=was)]
        elif old != new and was == "begun with":
            lines.append(f"{name}: {was} {shown(old)}, now {shown(new)}")
        elif old != new:
            lines.append(f"{name}: {shown(old)} {was}, {shown(new)} now")
    return lines


def shown(value: object) -> str:
    """A value in a message."""
    if value is None:
        return "absent"
    return repr(value) if isinstance(value, str) and "," in value else str(value)


def _refuse(folder: Path, lines: list[str]) -> None:
    if lines:
        raise PacksError(
            f"packing.path: the packs in {folder} were made from something else ({MANIFEST}):\n"
            f"{indented(lines)}\nRestore these, or pack again."
        )
