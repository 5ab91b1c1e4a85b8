"""The packer of a split, and the size of the windows it works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.plan.batches import Plan, PlanSource, Shuffle
from vlmpack.data.plan.packers import (
    DEFAULT_MAX_SEQUENCES,
    STREAMED_SAMPLES_PER_ROW,
    BudgetPacker,
    FixedPacker,
    Sizes,
    advised_max_sequences,
    pack_in_order,
    window_samples,
)
from vlmpack.data.plan.state import IdentityValue

DRY_RUN_SAMPLES = 65_536


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a split's order is cut.

    Args:
        packer: cuts a window's order into global batches.
        window: samples in a window.
    """

    packer: FixedPacker | BudgetPacker
    window: int

    @property
    def identity(self) -> dict[str, IdentityValue]:
        """What of it decides the order, beside the fields that every mode has."""
        if not isinstance(self.packer, BudgetPacker):
            return {}
        budget = self.packer.budget
        return {
            "packing.max_tokens": budget.max_tokens,
            "packing.max_vision_patches": budget.max_patches,
            "packing.max_sequences": budget.max_sequences,
            "packing.alignment": budget.alignment,
            "packing.scope": self.packer.scope,
            "window": self.window,
        }


def cut_indexed(
    config: DataConfig, sources: Sequence[PlanSource], shuffle: Shuffle, sizes: Sizes
) -> Cutting:
    """For a split whose samples are all known: settled by a dry run over its first samples."""
    if config.budget is None:
        return _fixed(config)
    assert shuffle != "window"
    dry = Plan(sources, seed=config.seed, shuffle=shuffle, window=DRY_RUN_SAMPLES, packer=_NO_ROWS)
    order = dry.window_order(0, 0) if dry.num_windows else np.empty(0, np.int64)
    rows = pack_in_order(*sizes(order), config.budget)
    most = config.budget.max_sequences
    if most is None:
        most = advised_max_sequences([len(row) for row in rows])
    per_row = -(-order.shape[0] // max(1, len(rows)))
    return _budget(config, sizes, max_sequences=most, samples_per_row=per_row)


def cut_streamed(config: DataConfig, sizes: Sizes) -> Cutting:
    """For a split of which nothing need be known."""
    if config.budget is None:
        return _fixed(config)
    most = config.budget.max_sequences or DEFAULT_MAX_SEQUENCES
    return _budget(config, sizes, max_sequences=most, samples_per_row=STREAMED_SAMPLES_PER_ROW)


_NO_ROWS = FixedPacker(1, 1)


def _fixed(config: DataConfig) -> Cutting:
    packer = FixedPacker(config.global_batch_size, config.micro_batch_size)
    return Cutting(packer, window_samples(config.global_batch_size))


def _budget(
    config: DataConfig, sizes: Sizes, *, max_sequences: int, samples_per_row: int
) -> Cutting:
    assert config.budget is not None
    packer = BudgetPacker(
        budget=replace(config.budget, max_sequences=max_sequences),
        global_batch_size=config.global_batch_size,
        scope=config.scope,
        sizes=sizes,
    )
    in_rows = config.scope == "stream"
    return Cutting(
        packer, window_samples(config.global_batch_size, samples_per_row if in_rows else 0)
    )
