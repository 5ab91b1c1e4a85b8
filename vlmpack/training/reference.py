"""The reference model's log-probabilities of a split's pairs, made once and kept.

The engine computes them before anything is trained: by the function that the objective uses, in
eval mode, without gradients, and without drawing from any generator. What is there already is not
computed again, so a pass that was stopped goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.data.loading.pair_columns import Float64s
from vlmpack.data.pipeline import TrainData
from vlmpack.distributed import Ranks
from vlmpack.packing import Batch
from vlmpack.training.objective import forward_step
from vlmpack.training.preference import sequence_log_probabilities
from vlmpack.training.reference_file import ReferenceFile, Row

logger = logging.getLogger("vlmpack")

BATCHES_PER_PART = 64
"""Micro-batches of each rank between two writes: what a stop loses."""


def log_probabilities(engine: Engine, batch: Batch) -> list[float]:
    """log p of each sequence of a batch of pairs, under the engine's weights as they are; [] on a
    rank that computes none, or the same as another of its replica."""
    found = sequence_values(engine, batch)
    values: list[float] = [] if found is None else found.tolist()
    return values


def without_adapters(engine: Engine, batches: Sequence[Batch]) -> list[Batch]:
    """Batches of pairs with the reference that the engine's model is without its adapters; nothing
    is drawn, nor read on the host.

    Raises:
        CapabilityError: see `Engine.adapters_off`.
    """
    ACTIVITY.enter("reference log-probabilities")
    with engine.adapters_off():
        return [replace(batch, reference=sequence_values(engine, batch)) for batch in batches]


def sequence_values(engine: Engine, batch: Batch) -> Tensor | None:
    """(N,) float64 on the engine's device: see `log_probabilities`; None for []."""
    step = partial(forward_step, sums=_log_p, of_rows=True)
    [report] = engine.forward_backward(step, iter([batch]), num_microbatches=1, forward_only=True)
    return report.get("log_p")


def _log_p(losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    return {"loss_sum": losses.sum(), "log_p": sequence_log_probabilities(losses, batch)}


def make_reference(
    engine: Engine, train: TrainData, ranks: Ranks, file: ReferenceFile
) -> tuple[Float64s, int]:
    """The whole table of a split, and how many pairs were computed now. Collective.

    Args:
        engine: with the reference model's weights.
        train: the split.
        ranks: who this process is.
        file: where it is kept; the main rank reads and writes it.

    Raises:
        ReferenceCacheError: a folder of another reference, or one that cannot be written.
        DataError: a bad sample whose class is not skipped.
    """
    table = ranks.on_main(file.read)
    fitted = train.fitted
    missing = fitted.eligible & ~fitted.table.bad & np.isnan(table).any(axis=1)
    numbers: list[int] = np.flatnonzero(missing).tolist()
    if not numbers:
        return table, 0
    started, done, pending = time.perf_counter(), 0, list[Row]()
    ACTIVITY.enter("reference log-probabilities")

    def keep() -> int:
        rows = [row for share in ranks.gather_objects(pending) for row in share]
        rows = sorted(set(rows))
        for number, chosen, rejected in rows:
            table[number] = chosen, rejected
        ranks.on_main(partial(file.write, rows))
        pending.clear()
        return len(rows)

    batches = train.numbered_batches(numbers, rank=ranks.dp_rank, dp=ranks.dp_size, replica=ranks)
    for place, micro in enumerate(batches, start=1):
        found = log_probabilities(engine, micro.batch)
        if found:
            of_batch = [sample.number for sample in micro.samples]
            pairs = zip(of_batch, found[0::2], found[1::2], strict=True)
            pending.extend((number, chosen, rejected) for number, chosen, rejected in pairs)
        if place % BATCHES_PER_PART == 0:
            done += keep()
            if ranks.is_main:
                logger.info("%-14s %d of %d pairs", "reference", done, len(numbers))
    done += keep()
    if ranks.is_main:
        seconds = time.perf_counter() - started
        logger.info("%-14s %d pairs in %.1f s, kept in %s", "reference", done, seconds, file.folder)
    return table, done
