"""One optimizer step: micro-batches in, updated weights and one small report out.

Everything that the host needs to know about a step travels in one float64 tensor that is summed
over the replicas and read once, before `optimizer.step`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmpack.backends.engine import Engine
from vlmpack.distributed import Ranks
from vlmpack.errors import NonFiniteError
from vlmpack.packing import Batch
from vlmpack.training.optim import Schedule
from vlmpack.training.vlm_step import forward_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Sums over all micro-batches of all replicas in one optimizer step.

    Args:
        loss_sum: sum of the losses of all label tokens.
        num_label_tokens: their number; the loss is normalised by it once.
        num_tokens: real tokens.
        num_slots: computed slots, padding included.
        num_padded_slots: slots that the same micro-batches take in mode `none`.
        num_samples: samples trained.
        num_skipped: samples left out as holes.
        stop_votes: ranks that were asked to stop.
        grad_norm: global norm before clipping; 0 without a backward pass.
    """

    loss_sum: float
    num_label_tokens: int
    num_tokens: int
    num_slots: int
    num_padded_slots: int
    num_samples: int
    num_skipped: int
    stop_votes: int
    grad_norm: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss of a label token."""
        return self.loss_sum / max(1, self.num_label_tokens)


def _local_sums(
    reports: Sequence[dict[str, Tensor]], batches: Sequence[Batch], extra: Sequence[int]
) -> Tensor:
    """(8,) float64 on the device of the reports: this rank's share of StepSums."""
    loss = torch.stack([report["loss_sum"] for report in reports]).sum()
    counts = [
        sum(batch.num_label_tokens for batch in batches),
        sum(batch.num_tokens for batch in batches),
        sum(batch.num_slots for batch in batches),
        sum(batch.num_padded_slots for batch in batches),
        sum(len(batch.keys) for batch in batches),
        *extra,
    ]
    rest = torch.tensor(counts, dtype=torch.float64).to(loss.device, non_blocking=True)
    return torch.cat([loss[None], rest])


def _named(values: Sequence[float], grad_norm: float = 0.0) -> StepSums:
    loss, labels, tokens, slots, padded, samples, skipped, votes = values
    return StepSums(
        loss_sum=loss,
        num_label_tokens=int(labels),
        num_tokens=int(tokens),
        num_slots=int(slots),
        num_padded_slots=int(padded),
        num_samples=int(samples),
        num_skipped=int(skipped),
        stop_votes=int(votes),
        grad_norm=grad_norm,
    )


@dataclass(slots=True, kw_only=True)
class Stepper:
    """Runs optimizer steps.

    Args:
        engine: the model and its schedule.
        optimizer: over `engine.parameters()`.
        schedule: learning rate by step.
        max_grad_norm: global norm to clip to; None for no clipping.
        ranks: who this process is.
    """

    engine: Engine
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    max_grad_norm: float | None
    ranks: Ranks

    def train(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        num_skipped: int,
        stop: bool,
        names: Sequence[Sequence[str]] | None = None,
    ) -> tuple[StepSums, dict[str, float]]:
        """One optimizer step.

        Args:
            step: steps taken before this one.
            batches: this rank's micro-batches, on CPU; the same number on every rank.
            num_skipped: samples of this rank that became holes.
            stop: whether this rank was asked to stop.
            names: the samples of each micro-batch, for messages; None for the batches' keys.

        Returns:
            Global sums, and the seconds spent in each phase.

        Raises:
            NonFiniteError: loss or gradient norm is not finite; no weight has changed.
        """
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        reports = self.engine.forward_backward(
            forward_step, iter(batches), num_microbatches=len(batches)
        )
        sums = self.ranks.sum_over_dp(_local_sums(reports, batches, (num_skipped, int(stop))))
        # Replicas average their gradients of sums: dp / labels turns that into the gradient of the
        # mean over all label tokens of the global batch.
        self.engine.scale_gradients((self.ranks.dp_size / sums[1].clamp(min=1)).float())
        norm = self.engine.clip_gradients(self.max_grad_norm)
        values = torch.cat([sums, norm.double()[None]]).tolist()  # the step's one host read
        result = _named(values[:-1], grad_norm=values[-1])
        computed = time.perf_counter()
        if not (math.isfinite(result.loss_sum) and math.isfinite(result.grad_norm)):
            self._stop_on_non_finite(
                step, reports, names or [batch.keys for batch in batches], result
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(step)
        if result.num_label_tokens:  # a global batch of holes teaches nothing, on every rank alike
            self.optimizer.step()
        finished = time.perf_counter()
        return result, {
            "forward_backward_seconds": computed - started,
            "optimizer_seconds": finished - computed,
        }

    def evaluate(self, batches: Sequence[Batch]) -> StepSums:
        """Loss sums of some micro-batches, without gradients."""
        reports = self.engine.forward_backward(
            forward_step, iter(batches), num_microbatches=len(batches), forward_only=True
        )
        sums = self.ranks.sum_over_dp(_local_sums(reports, batches, (0, 0)))
        return _named(sums.tolist())

    def _stop_on_non_finite(
        self,
        step: int,
        reports: Sequence[dict[str, Tensor]],
        names: Sequence[Sequence[str]],
        result: StepSums,
    ) -> None:
        """Name the samples, drop the gradients, and stop on all ranks alike."""
        self.optimizer.zero_grad(set_to_none=True)
        mine = [
            of_batch
            for report, of_batch in zip(reports, names, strict=True)
            if not bool(torch.isfinite(report["loss_sum"]))
        ]
        named = [keys for rank in self.ranks.gather_objects(mine) for keys in rank]
        if not named:  # the gradient alone overflowed: any sample of the step may be the cause
            everyone = self.ranks.gather_objects(names)
            named = [keys for rank in everyone for keys in rank]
        listed = "; ".join(", ".join(keys) for keys in named)
        raise NonFiniteError(
            f"step {step + 1}: loss sum {result.loss_sum}, gradient norm {result.grad_norm}; "
            f"stopped before the optimizer step, no weight has changed. Samples of the "
            f"micro-batches concerned: {listed}. Look at these samples, lower optim.lr, or set "
            f"optim.max_grad_norm"
        )
