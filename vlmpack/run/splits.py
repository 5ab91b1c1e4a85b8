"""A run's splits, opened, and their description.

That is a few lines in the log, and data-summary.json for the report.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from vlmpack.addresses import is_remote
from vlmpack.build.data import LISTING_NAME, DataSpec, ShardListing, open_split
from vlmpack.data.config import DataConfig
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.modes import PackingMode
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.summary import DataSummary, name_unknown_keys, share_words
from vlmpack.training.run_dir import RunDir
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")

EXAMPLE_MICRO_BATCHES = 12
"""Micro-batches of a launch's first steps that the report draws to scale."""


class Splits(NamedTuple):
    train: TrainData
    validation: TrainData | None
    test: TrainData | None
    summary: DataSummary

    def figures(self, state: DataState) -> dict[str, Any]:
        """data-summary.json: what the report draws, from lengths alone."""
        paths = _paths_by_split((self.train, self.validation, self.test))
        also_in = _test_also_in(paths)
        figures = data_summary(self.train, state, self.summary) | {"test_also_in": also_in}
        outcomes = self.train.outcomes
        return figures if outcomes is None else figures | {"rollouts": outcomes.counts}


def open_splits(data: DataSpec, run_dir: RunDir, *, answers: bool) -> Splits:
    """Open the splits and log their content. Collective."""
    ledger = Ledger(run_dir.data_errors)
    listing = ShardListing(run_dir.path / LISTING_NAME)
    train = open_split(data, "data.train", ledger, listing=listing)
    assert train is not None  # data.train is required
    validation = open_split(data, "data.validation", ledger)
    test = open_split(data, "data.test", ledger) if answers else None
    summary = train.summary()
    unit = "pairs" if data.encoder.settings.pairs else "samples"
    log_data(train.config, summary, unit)
    if train.outcomes is not None:
        logger.info("%-14s %s", "rollouts", train.outcomes.words)
    if validation is not None and validation.config.share is not None:
        logger.info(
            "%-14s %s", "validation", share_words(validation.config, validation.fitted, unit)
        )
    log_graphs(train.config.mode, summary)
    unknown: dict[str, Mapping[str, int]] = {"data.train": summary.unknown_keys}
    for split in (validation, test):
        if split is not None:
            unknown[split.config.key] = split.fitted.table.unknown_keys
    name_unknown_keys(unknown)
    return Splits(train, validation, test, summary)


def data_summary(train: TrainData, state: DataState, summary: DataSummary) -> dict[str, Any]:
    """Figures of the training split, from lengths alone.

    Args:
        state: where the launch begins. The examples are its first micro-batches, fewer where its
            window has fewer: other ranks wait, and no further shard is indexed for them.
    """
    usable: Counter[int] = Counter()
    for lengths, _ in train.split.usable_sizes():
        values, counts = np.unique(lengths, return_counts=True)
        usable.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    window = train.plan.packed(state.position, state.cursors)[state.batch :]
    bins = [samples for batch in window for samples in batch][:EXAMPLE_MICRO_BATCHES]
    examples = [[train.ref(number).num_tokens for number in samples] for samples in bins]
    return {
        "packing_mode": train.config.mode.name,
        "length_histogram": {str(n): count for n, count in sorted(usable.items())},
        "padded_tokens_none": summary.padded_slots,
        "packed_tokens": summary.packed_slots,
        "real_tokens": summary.epoch_tokens,
        "example_micro_batches": examples,
        "summary": {k: v for k, v in asdict(summary).items() if k != "first_fault"},
    }


def log_data(config: DataConfig, summary: DataSummary, unit: str = "samples") -> None:
    """What the packing mode does to this data, in one line."""
    saved = summary.padding_removed / max(1, summary.padded_slots)
    lengths = summary.length_percentiles
    left_out = summary.num_samples - summary.num_usable
    logger.info(
        "%-14s %d %s%s, %d to %d tokens (median %d), %s%s an epoch",
        "data",
        summary.num_usable,
        unit,
        f" ({left_out} of {summary.num_samples} left out)" if left_out else "",
        lengths[0],
        lengths[100],
        lengths[50],
        "" if summary.epoch_is_exact else "about ",
        counted(summary.epoch_steps, "step"),
    )
    if left_out:
        logger.warning("%-14s %s", "left out", _left_out(summary))
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
    mode, whole = config.mode, config.training.global_batch_size
    if mode.facts.pads:
        what = f"rows are padded: {saved:.0%} of the slots of an epoch hold no token"
    elif mode.facts.plans_rows:
        each, fill = summary.row_samples / summary.num_rows, mode.budget.fill
        what = (
            f"rows of up to {mode.budget.text(unit)}, with {each:.1f} {unit} and "
            f"{fill(summary.epoch_tokens, summary.num_rows):.1%} of these tokens each; a step "
            "trains "
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
    """How many samples are left out for which reason, the commonest first. Then the first bad one,
    and the settings that stop the run instead."""
    reasons = Counter({f"bad ({name})": count for name, count in summary.num_bad.items()})
    reasons["too long"] = summary.num_dropped
    said = ", ".join(f"{count} {why}" for why, count in reasons.most_common() if count)
    stops = [f"data.on_error.{name}: raise" for name in summary.num_bad]
    stops += ["data.over_long: error"] * bool(summary.num_dropped)
    return f"{said}{summary.first_fault}; {' or '.join(stops)} would stop"


def log_graphs(mode: PackingMode, summary: DataSummary) -> None:
    """Log which rows a captured decoder takes, if any; warn if it takes next to none.

    Args:
        mode: resolved, so that `cuda_graph_max_sequences: auto` is a number.
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


def _paths_by_split(splits: Sequence[TrainData | None]) -> dict[str, set[str]]:
    """Paths of the shards of each split, to find shards that two splits share."""
    return {
        split.config.key: {
            path if is_remote(path) else os.path.realpath(path)
            for path in (stamp.path for stamp in split.shards)
        }
        for split in splits
        if split is not None
    }


def _test_also_in(paths: Mapping[str, set[str]]) -> list[str] | None:
    """The other splits that hold shards of the test split; None where that is not known."""
    test = paths.get("data.test")
    if not test or not all(paths.values()):
        return None
    return [key for key, own in paths.items() if key != "data.test" and own & test]
