"""A sentinel: every N steps a sample of a trained row is run alone, and its losses are compared.

    a row as it trains         a a a | b b b b | c c        losses of b as the step trains them
    b alone, the plain path    b b b b                      the same, or something is broken

The plain path has stock modules in place of fused ones and of compiled layers, no captured graph,
the loop over segments as attention, and no dropout (`kernel_operators.plain_path`). Weights,
autocast and sharding are those of the step. So what differs is packing, and what makes it fast.

The sample follows from seed, step and replica. All ranks run the same forward passes, each
replica a sample of its own. It runs between the backward pass and the optimizer step, without
gradients and in eval mode, and no generator is read. A run is bit for bit the same without it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import torch
from torch import Tensor

from vlmpack.activity import ACTIVITY
from vlmpack.alignment import Alignment
from vlmpack.backends.engine import Engine
from vlmpack.errors import CapabilityError, SentinelError
from vlmpack.kernel_operators import plain_path
from vlmpack.packing import Batch, PackedBatch, pack_batch_sequences
from vlmpack.packing.pairs import sample_in, slots_of
from vlmpack.training.objective import SFT, Objective

logger = logging.getLogger("vlmpack")

BOUNDS: Mapping[torch.dtype, float] = {torch.float32: 2e-5, torch.bfloat16: 0.1}
"""Largest difference of a token's loss, over the loss where that is above 1, by compute dtype.
Clean runs stay below 1.5e-6 and 0.036 (docs/measured.md)."""


@dataclass(frozen=True, slots=True, order=True)
class _Finding:
    """The token of a sample whose losses differ most, on one rank."""

    error: float
    replica: int
    key: str
    token: int
    length: int
    in_row: float
    alone: float


@dataclass(slots=True, kw_only=True)
class Sentinel:
    """Compares a sample with itself every `interval` steps.

    Args:
        on_difference: what happens beyond the bound.
        multiples: what segments and rows of the layout are multiples of.
        wall_seconds: spent in comparisons so far.
        cpu_seconds: of this thread, in the same.

    Raises:
        CapabilityError: the engine has no plain path.
    """

    engine: Engine
    interval: int
    on_difference: Literal["stop", "warn"]
    seed: int
    multiples: Alignment
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    _chosen: tuple[int, int] | None = None
    _seen: list[tuple[Tensor, Batch]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.engine.has_plain_path:
            raise CapabilityError(
                "training.sentinel_interval: layers of Transformer Engine have no plain path to "
                "compare with. Set model.attention to segments, or leave the interval out"
            )

    def is_due(self, step: int) -> bool:
        """Whether it looks at a step, counted from 0."""
        return (step + 1) % self.interval == 0

    def watched(self, objective: Objective) -> Objective:
        """The objective, which also shows each micro-batch's losses here."""
        self._seen.clear()
        return objective.shown_to(self._look)

    def _look(self, losses: Tensor, batch: Batch) -> None:
        self._seen.append((losses, batch))

    def compare(self, step: int, batches: Sequence[Batch], objective: Objective) -> None:
        """Run the sample of a step alone. Collective, after the step's forward passes.

        Args:
            step: steps taken before this one.
            batches: this rank's micro-batches, on CPU.

        Raises:
            SentinelError: on all ranks alike, if a loss differs beyond the bound and
                `on_difference` is stop.
        """
        wall, thread = time.perf_counter(), time.thread_time()
        ACTIVITY.enter("sentinel")
        chosen = self._choose(step, batches)
        number, place = chosen or (0, None)
        batch = batches[number]
        seen = self._seen[number : number + 1]
        if self.engine.draws or objective.forward_step is not None:
            seen = self._run(batch)
        alone = batch if place is None else self._alone(batch, place)
        with plain_path():
            own = self._run(alone)
        mine = None
        if place is not None and seen and own:  # a stage without losses has none
            mine = self._worst(batch, place, _by_slot(*seen[0]), alone, _by_slot(*own[0]))
        self._seen.clear()
        found = [one for one in self.engine.ranks.gather_objects(mine) if one is not None]
        self.wall_seconds += time.perf_counter() - wall
        self.cpu_seconds += time.thread_time() - thread
        if found:
            self._judge(step, found)

    def _choose(self, step: int, batches: Sequence[Batch]) -> tuple[int, int] | None:
        """Micro-batch and place of a sample with labels; None where there is none."""
        places = [(m, n) for m, batch in enumerate(batches) for n in range(len(batch.keys))]
        draw = Random(f"{self.seed} {step} {self.engine.ranks.dp_rank}")
        for number, place in draw.sample(places, len(places)):
            slots = slots_of(batches[number], place)
            if bool(torch.isin(batches[number].label_positions, slots).any()):
                return number, place
        return None

    def _alone(self, batch: Batch, place: int) -> PackedBatch:
        """The sample as a row. Its segment is as long as it was, so context-parallel ranks hold the
        same tokens."""
        lengths = [batch.input_ids.shape[1]]
        if isinstance(batch, PackedBatch):
            lengths = [*batch.segment_lengths[: len(batch.segment_tokens)]]
        multiple = math.gcd(*lengths)
        return pack_batch_sequences(
            [sample_in(batch, place)],
            pad_to_multiple_of=multiple,
            pad_token_id=0,
            total_multiple_of=math.lcm(multiple, self.multiples.row),
        )

    def _run(self, batch: Batch) -> list[tuple[Tensor, Batch]]:
        """The token losses of a batch in eval mode, where this rank computes any."""
        seen: list[tuple[Tensor, Batch]] = []
        objective = SFT.shown_to(lambda losses, given: seen.append((losses, given)))
        self.engine.forward_backward(
            objective.step_with(), iter([batch]), num_microbatches=1, forward_only=True
        )
        return seen

    def _worst(
        self,
        batch: Batch,
        place: int,
        in_row: Mapping[int, float],
        alone: Batch,
        own: Mapping[int, float],
    ) -> _Finding | None:
        """The token that differs most of those whose losses are on this rank."""
        slots = zip(slots_of(batch, place).tolist(), slots_of(alone, 0).tolist(), strict=True)
        named = self.engine.ranks.dp_rank, batch.keys[place]
        length = sum(alone.lengths)
        findings = [
            _Finding(
                _error(in_row[there], own[here]), *named, token, length, in_row[there], own[here]
            )
            for token, (there, here) in enumerate(slots)
            if there in in_row and here in own
        ]
        return max(findings, default=None)

    def _judge(self, step: int, found: Sequence[_Finding]) -> None:
        worst, dtype = max(found), str(self.engine.compute_dtype).removeprefix("torch.")
        bound, is_main = BOUNDS[self.engine.compute_dtype], self.engine.ranks.is_main
        if worst.error <= bound:
            samples = len({one.replica for one in found})
            whose = (
                "sample alone are those of its row"
                if samples == 1
                else "samples alone are those of their rows"
            )
            if is_main:
                logger.info(
                    "%-14s step %d: losses of %d %s, within %.1e; the bound in %s is %.1e",
                    *("sentinel", step + 1, samples, whose, worst.error, dtype, bound),
                )
            return
        losses = f"the loss is {worst.in_row:.6g} in the row that was trained"
        message = (
            f"sentinel: step {step + 1}: sample {worst.key!r}, token {worst.token} of "
            f"{worst.length}: {losses}, and {worst.alone:.6g} where the sample is run alone "
            f"through the plain path. They differ by {worst.error:.2g}, the bound in {dtype} is "
            f"{bound:.2g}"
        )
        if self.on_difference == "stop":
            raise SentinelError(f"{message}. {_ADVICE}. {_WHERE}")
        if is_main:
            logger.warning("%s. The run goes on, as training.on_sentinel is warn", message)


_ADVICE = (
    "Stopped before the optimizer step, and this step is not saved. Run `vlmpack verify` with this "
    "recipe. With training.on_sentinel warn the run goes on"
)
_WHERE = (
    "To find the part that differs, set model.fused_layers or training.cuda_graphs to none, "
    "model.compile to false, or model.attention to segments, one at a time. If each differs, try "
    "another device"
)


def _error(in_row: float, alone: float) -> float:
    """The difference of two losses, over the loss where that is above 1; inf for one that is no
    number."""
    error = abs(in_row - alone) / max(1.0, alone)
    return error if math.isfinite(error) else math.inf


def _by_slot(losses: Tensor, batch: Batch) -> dict[int, float]:
    """Slot of the whole row -> loss, for the label tokens of this rank."""
    context = batch.context
    slots = batch.label_positions
    if context is not None:
        slots = context.row_index[context.label_positions]
    return dict(zip(slots.tolist(), losses.tolist(), strict=True))
