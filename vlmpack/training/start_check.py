"""The first step of a run of pairs: the policy is still the reference, so both must say the same.

    log p of each sequence, in the step's own forward pass    -  its reference
    0 where both ran the same row; else the rounding of another row: `Noise`

What is further off is no rounding: numbers of another model or of other pairs, or a model that
computes otherwise while it trains. A resumed run is not looked at: its policy has moved away.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.data.pipeline import TrainData
from vlmpack.distributed import Ranks
from vlmpack.encode.sample import PAIR_NAMES
from vlmpack.errors import ReferenceCacheError
from vlmpack.packing import Batch
from vlmpack.training.objective import Objective
from vlmpack.training.preference import label_tokens, sequence_log_probabilities
from vlmpack.training.reference import log_probabilities

logger = logging.getLogger("vlmpack")

FLOORS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Differences of an answer's log p that are never more than rounding, by compute type."""

MEASURED_PAIRS = 8
"""Pairs of the first step that are run in two rows each."""

TOGETHER = 4
"""Most pairs of one of those rows."""

FACTOR = 8.0
"""The largest of a few differences, to the largest that many sequences may show."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far log p of a sequence may be off because it stood in another row.

    Args:
        floor: of the compute type.
        measured: over the square root of the sequence's label tokens: the largest difference
            between two packings of the same weights.
    """

    floor: float
    measured: float = 0.0

    def limit(self, tokens: float) -> float:
        """The most that rounding explains in a sequence with so many label tokens, whose errors add
        up as a random walk."""
        return max(self.floor, FACTOR * self.measured * math.sqrt(tokens))


class _Sequence(NamedTuple):
    """A sequence that was compared.

    Args:
        replica, micro_batch, number: where it is.
        log_p, reference: of it.
        limit: what rounding explains.
    """

    replica: int
    micro_batch: int
    number: int
    log_p: float
    reference: float
    limit: float

    @property
    def off(self) -> float:
        """How far from its reference; inf for what is no number."""
        difference = abs(self.log_p - self.reference)
        return difference if math.isfinite(difference) else math.inf

    @property
    def excess(self) -> float:
        """How many times its limit."""
        return self.off / self.limit


@dataclass(slots=True, kw_only=True)
class StartCheck:
    """Looks at a run's first step.

    Args:
        engine: the policy.
        noise: what may differ.
        cause: why the reference may be another model, for the message.
    """

    engine: Engine
    noise: Noise
    cause: str
    _seen: list[Tensor] = field(default_factory=list)

    def watched(self, objective: Objective) -> Objective:
        """The objective, which also shows each micro-batch's losses here."""
        self._seen.clear()
        return objective.shown_to(self._look)

    def _look(self, losses: Tensor, batch: Batch) -> None:
        """Keep (3, N) of a micro-batch on the device: log p, reference, label tokens."""
        log_p = sequence_log_probabilities(losses, batch)
        reference = log_p if batch.reference is None else batch.reference.to(log_p)
        self._seen.append(torch.stack([log_p, reference, label_tokens(batch)]))

    def judge(self, batches: Sequence[Batch]) -> None:
        """After the forward passes of the step, before any weight has changed. Collective.

        Args:
            batches: the step's micro-batches on this rank.

        Raises:
            ReferenceCacheError: on all ranks alike, with the sequence that is furthest off.
        """
        ranks, found = self.engine.ranks, self._sequences()
        worst = max(found, key=lambda one: one.excess, default=None)
        counts = sum(one.excess > 1 for one in found), len(found)
        shares = ranks.gather_objects((worst, counts) if worst is not None else None)
        known = [share for share in shares if share is not None]
        if not known:
            return
        everywhere = [one for one, _ in known]
        by_replica = {one.replica: both for one, both in known}  # all ranks of one say the same
        num_off, total = (sum(column) for column in zip(*by_replica.values(), strict=True))
        worst = max(everywhere, key=lambda one: one.excess)
        if worst.excess > 1:
            message = self._message(worst, batches, f"{num_off} of {total}")
            raise ReferenceCacheError(message)
        if ranks.is_main:
            logger.info(
                "%-14s policy and reference say the same of %d sequences: log p within %.1e",
                "first step",
                total,
                max(one.off for one in everywhere),
            )

    def _sequences(self) -> list[_Sequence]:
        """What this rank's micro-batches showed, read on the host."""
        found = []
        for place, values in enumerate(self._seen):
            log_p, reference, tokens = values.tolist()
            for n, count in enumerate(tokens):
                limit = self.noise.limit(count)
                found.append(
                    _Sequence(self.engine.ranks.dp_rank, place, n, log_p[n], reference[n], limit)
                )
        self._seen.clear()
        return found

    def _message(self, worst: _Sequence, batches: Sequence[Batch], count: str) -> str:
        """Collective: all ranks run the micro-batch of that place once more, in eval mode."""
        ranks, batch = self.engine.ranks, batches[worst.micro_batch]
        values = log_probabilities(self.engine, batch)
        mine = None
        if ranks.dp_rank == worst.replica and worst.number < len(values):
            mine = (sequence_name(batch, worst.number), values[worst.number])
        name, evaluated = next(one for one in ranks.gather_objects(mine) if one is not None)
        cause = f"The likely cause: {self.cause}"
        if abs(evaluated - worst.reference) <= worst.limit:
            cause = (
                f"In eval mode the model says {evaluated:.6g}, so it computes otherwise while it "
                "trains: look for dropout in the model folder's config.json (attention_dropout and "
                "the like), and set it to 0"
            )
        return (
            f"step 1: {name} has log p {worst.log_p:.6g}, and {worst.reference:.6g} under the "
            f"reference, {worst.off:.3g} apart; {count} sequences are too far off. Before the "
            f"first step policy and reference are the same model, and rounding explains "
            f"{worst.limit:.2g}. {cause}. No weight has changed"
        )


def sequence_name(batch: Batch, number: int) -> str:
    """A sequence, for messages."""
    return f"the {PAIR_NAMES[number % 2]} answer of sample {batch.keys[number // 2]!r}"


def measured_noise(engine: Engine, train: TrainData, ranks: Ranks, dtype: torch.dtype) -> Noise:
    """What two packings of the same pairs differ by, with the weights as they are: rows of about as
    many pairs as those of the first step, and other rows. Collective; nothing is drawn.

    Args:
        engine: with the reference model's weights.
        train: the split.
        ranks: who this process is.
        dtype: that the engine computes in.

    Raises:
        DataError: a bad sample whose class is not skipped.
    """
    floor = FLOORS.get(dtype, FLOORS[torch.bfloat16])
    first = next(train.planned(train.start(), None), None)
    if first is None:
        return Noise(floor)
    ACTIVITY.enter("rounding of log-probabilities")
    planned = [n for samples in first.bins for n in samples][:MEASURED_PAIRS]
    numbers: list[int] = train.split.places(np.array(planned, dtype=np.int64)).tolist()
    together = max(1, min(TOGETHER, len(first.bins[0])))
    apart = 1 if together > 1 else 2  # where the numbers were made in rows of pairs, or of one
    ours, theirs = (_measured(engine, train, ranks, numbers, part) for part in (together, apart))
    differences = [
        abs(a - b) / math.sqrt(max(1, count))
        for key, (a, count) in ours.items()
        for b, _ in [theirs.get(key, (a, count))]
    ]
    return Noise(floor, max(differences, default=0.0))


def _measured(
    engine: Engine, train: TrainData, ranks: Ranks, numbers: Sequence[int], together: int
) -> dict[tuple[int, int], tuple[float, int]]:
    """(number of the pair, side) -> log p and label tokens, of rows of so many pairs."""
    mine: dict[tuple[int, int], tuple[float, int]] = {}
    for micro in train.numbered_batches(
        numbers, rank=ranks.dp_rank, dp=ranks.dp_size, together=together, replica=ranks
    ):
        batch, of_batch = micro.batch, [sample.number for sample in micro.samples]
        values = log_probabilities(engine, batch)
        if batch.label_sequences is None:
            continue
        counts = torch.bincount(batch.label_sequences, minlength=len(batch.lengths)).tolist()
        for place, (log_p, count) in enumerate(zip(values, counts, strict=False)):
            mine[of_batch[place // 2], place % 2] = (log_p, count)
    return {key: value for share in ranks.gather_objects(mine) for key, value in share.items()}
