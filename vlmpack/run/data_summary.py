"""What a launch says of its data: a few lines in the log, and data-summary.json for the report."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict
from typing import Any

from vlmpack.data.config import DataConfig
from vlmpack.data.modes import PackingMode
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.checks import name_unknown_keys
from vlmpack.data.splits.summary import DataSummary
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")

EXAMPLE_MICRO_BATCHES = 12
"""Micro-batches of a launch's first steps that the report draws to scale."""


def data_summary(train: TrainData, state: DataState, summary: DataSummary) -> dict[str, Any]:
    """data-summary.json: what the report draws, from lengths alone.

    Args:
        state: where the launch begins; the examples are its first micro-batches, fewer where its
            window has fewer: other ranks wait, and no further shard is indexed for them.
    """
    usable = train.split.usable_sizes()[0].tolist()
    window = train.plan.packed(state.position, state.cursors)[state.batch :]
    bins = [samples for batch in window for samples in batch][:EXAMPLE_MICRO_BATCHES]
    examples = [[train.ref(number).num_tokens for number in samples] for samples in bins]
    return {
        "packing_mode": train.config.mode.name,
        "length_histogram": {str(n): count for n, count in sorted(Counter(usable).items())},
        "padded_tokens_none": summary.padded_slots,
        "packed_tokens": summary.packed_slots,
        "real_tokens": summary.epoch_tokens,
        "example_micro_batches": examples,
        "summary": asdict(summary),
    }


def log_data(config: DataConfig, summary: DataSummary, unit: str = "samples") -> None:
    """What the packing mode does to this data, in one line.

    Args:
        unit: what samples are called.
    """
    saved = summary.padding_removed / max(1, summary.padded_slots)
    lengths = summary.length_percentiles
    left_out = summary.num_samples - summary.num_usable
    logger.info(
        "%-14s %d %s%s, %d to %d tokens (median %d), %s%d steps an epoch",
        "data",
        summary.num_usable,
        unit,
        f" ({left_out} of {summary.num_samples} left out: {_left_out(summary)})"
        if left_out
        else "",
        lengths[0],
        lengths[100],
        lengths[50],
        "" if summary.epoch_is_exact else "about ",
        summary.epoch_steps,
    )
    if summary.num_without_image:
        logger.info(
            "%-14s %d of %d %s have no image",
            "images",
            summary.num_without_image,
            summary.num_usable,
            unit,
        )
    if summary.num_indexed < summary.num_shards:
        logger.info(
            "%-14s %d of %d shards are read so far, and these figures are theirs; the others are "
            "indexed ahead of use",
            "index",
            summary.num_indexed,
            summary.num_shards,
        )
    name_unknown_keys(summary.unknown_keys)
    mode, whole = config.mode, config.training.global_batch_size
    if mode.facts.pads:
        what = f"rows are padded: {saved:.0%} of the slots of an epoch hold no token"
    elif mode.facts.plans_rows:
        each, fill = summary.row_samples / summary.num_rows, mode.budget.fill
        what = (
            f"rows of up to {mode.budget.text(unit)}, {each:.1f} {unit} each, "
            f"{fill(summary.epoch_tokens, summary.num_rows):.1%} full; a step trains "
            + (
                f"{whole} rows, about {whole * each:.0f} {unit}"
                if mode.packing.counts_rows
                else f"{whole} {unit}"
            )
        )
    else:
        what = (
            f"each micro-batch of {config.training.micro_batch_size} {unit} is one row; "
            f"{saved:.0%} of the slots that padded rows would take are gone"
        )
    logger.info("%-14s %s: %s", "packing", mode.name, what)


def _left_out(summary: DataSummary) -> str:
    """How many samples for which reason, the commonest first."""
    reasons = Counter({f"bad ({name})": count for name, count in summary.num_bad.items()})
    reasons["too long"] = summary.num_dropped
    return ", ".join(f"{count} {why}" for why, count in reasons.most_common() if count)


def log_graphs(mode: PackingMode, summary: DataSummary) -> None:
    """Which rows a captured decoder takes, in one line; nothing without one. A warning where it
    takes next to none.

    Args:
        mode: settled, so that `cuda_graph_max_sequences: auto` is a number.
    """
    shape = mode.fixed_shape() if mode.captures else None
    if shape is None or shape.most_filled is None:
        return
    logger.info(
        "%-14s rows of up to %s are filled up to %s tokens and replayed; others run eager, and "
        "metrics.jsonl counts them (num_eager_rows)",
        "graphs",
        counted(shape.most_filled, "sample"),
        f"{shape.row_tokens:,}",
    )
    if eager := mode.unreplayed(summary.fewest_row_samples):
        logger.warning("%-14s %s", "graphs", eager)
