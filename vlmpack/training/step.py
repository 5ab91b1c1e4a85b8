"""One optimizer step: micro-batches in, updated weights and one small report out.

Everything that the host needs to know about a step travels in one float64 tensor that is summed
over the world and read once, before the optimizer step.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.distributed import Ranks
from vlmpack.errors import NonFiniteError
from vlmpack.packing import Batch
from vlmpack.training.first_step import FirstStepCheck, count_seen_images
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
        num_writing: ranks that are still writing a checkpoint.
        num_seen_images: image tokens that a label comes after; 0 once nobody asks.
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
    num_writing: int
    num_seen_images: int = 0
    grad_norm: float = 0.0

    @property
    def loss(self) -> float | None:
        """Mean loss of a label token; None without any: 0 would be a perfect one."""
        return self.loss_sum / self.num_label_tokens if self.num_label_tokens else None


def _local_sums(
    reports: Sequence[dict[str, Tensor]],
    batches: Sequence[Batch],
    *,
    is_lead: bool,
    num_skipped: int = 0,
    votes: tuple[bool, bool] = (False, False),
    num_seen_images: int = 0,
) -> Tensor:
    """(10,) float64 on the device of the reports: this rank's share of StepSums.

    The processes of a replica hold the same batches, so its lead alone counts them; every process
    votes.
    """
    loss = torch.stack([report["loss_sum"] for report in reports]).sum()
    counts = [
        sum(batch.num_label_tokens for batch in batches),
        sum(batch.num_tokens for batch in batches),
        sum(batch.num_slots for batch in batches),
        sum(batch.num_padded_slots for batch in batches),
        sum(len(batch.keys) for batch in batches),
        num_skipped,
        num_seen_images,
    ]
    rest = torch.tensor(
        [*(count if is_lead else 0 for count in counts), *votes], dtype=torch.float64
    ).to(loss.device, non_blocking=True)
    return torch.cat([loss[None], rest])


def _named(values: Sequence[float], grad_norm: float = 0.0) -> StepSums:
    loss, labels, tokens, slots, padded, samples, skipped, seen, stops, writing = values
    return StepSums(
        loss_sum=loss,
        num_label_tokens=int(labels),
        num_tokens=int(tokens),
        num_slots=int(slots),
        num_padded_slots=int(padded),
        num_samples=int(samples),
        num_skipped=int(skipped),
        stop_votes=int(stops),
        num_writing=int(writing),
        num_seen_images=int(seen),
        grad_norm=grad_norm,
    )


def _watched(
    batches: Sequence[Batch],
    names: Sequence[Sequence[str]] | None,
    phase: str = "forward and backward",
) -> Iterator[Batch]:
    """The micro-batches; the watchdog learns which one is computed."""
    for number, batch in enumerate(batches):
        ACTIVITY.samples = batch.keys if names is None else names[number]
        ACTIVITY.enter(phase)
        yield batch


def seed_of_step(seed: int, step: int, replica: int) -> int:
    """A step's own seed: a resumed run draws what the unbroken one would have drawn, and replicas
    draw different numbers."""
    text = f"{seed} {step} {replica}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


@dataclass(slots=True, kw_only=True)
class Stepper:
    """Runs optimizer steps.

    Args:
        engine: the model and its optimizer.
        schedule: learning rate by step.
        max_grad_norm: global norm to clip to; None for no clipping.
        ranks: who this process is.
        check: looks at the first step; None for no look.
        dropout_seed: of the adapters' dropout; None where they have none.
    """

    engine: Engine
    schedule: Schedule
    max_grad_norm: float | None
    ranks: Ranks
    check: FirstStepCheck | None = None
    dropout_seed: int | None = None

    def train(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        num_skipped: int,
        stop: bool,
        writing: bool = False,
        names: Sequence[Sequence[str]] | None = None,
    ) -> tuple[StepSums, dict[str, float]]:
        """One optimizer step; the first one of a launch is looked at.

        Args:
            step: steps taken before this one.
            batches: this rank's micro-batches, on CPU; the same number on every rank.
            num_skipped: samples of this rank that became holes.
            stop: whether this rank was asked to stop.
            writing: whether this rank is still writing a checkpoint.
            names: the samples of each micro-batch, for messages; None for the batches' keys.

        Returns:
            Global sums, and the seconds spent in each phase.

        Raises:
            NonFiniteError: loss or gradient norm is not finite; no weight has changed.
            TrainabilityError: what is trained is not what the recipe says.
        """
        started = time.perf_counter()
        if self.dropout_seed is not None:
            torch.manual_seed(seed_of_step(self.dropout_seed, step, self.ranks.dp_rank))
        check = self.check if self.check is not None and self.check.pending else None
        self.engine.zero_gradients()
        reports = self.engine.forward_backward(
            forward_step, _watched(batches, names), num_microbatches=len(batches)
        )
        ACTIVITY.enter("sums over all ranks")
        sums = self.ranks.sum_over_world(
            _local_sums(
                reports,
                batches,
                is_lead=self.ranks.is_lead,
                num_skipped=num_skipped,
                votes=(stop, writing),
                num_seen_images=count_seen_images(batches) if check is not None else 0,
            )
        )
        norm = self.engine.finish_gradients(sums[1], self.max_grad_norm)
        values = torch.cat([sums, norm.double()[None]]).tolist()  # the step's one host read
        result = _named(values[:-1], grad_norm=values[-1])
        computed = time.perf_counter()
        if not (math.isfinite(result.loss_sum) and math.isfinite(result.grad_norm)):
            self._stop_on_non_finite(
                step, reports, names or [batch.keys for batch in batches], result
            )
        if result.num_label_tokens:  # a global batch of holes teaches nothing, on every rank alike
            lr = self.schedule(step)
            if check is not None:
                check.before_step(lr=lr, num_seen_images=result.num_seen_images)
            ACTIVITY.enter("optimizer")
            self.engine.step(lr)
            if check is not None:
                check.after_step()
        finished = time.perf_counter()
        return result, {
            "forward_backward_seconds": computed - started,
            "optimizer_seconds": finished - computed,
        }

    def evaluate(self, batches: Sequence[Batch]) -> StepSums:
        """Loss sums of some micro-batches, without gradients."""
        reports = self.engine.forward_backward(
            forward_step,
            _watched(batches, None, "validation"),
            num_microbatches=len(batches),
            forward_only=True,
        )
        sums = self.ranks.sum_over_world(_local_sums(reports, batches, is_lead=self.ranks.is_lead))
        return _named(sums.tolist())

    def _stop_on_non_finite(
        self,
        step: int,
        reports: Sequence[dict[str, Tensor]],
        names: Sequence[Sequence[str]],
        result: StepSums,
    ) -> None:
        """Name the samples, drop the gradients, and stop on all ranks alike."""
        self.engine.zero_gradients()
        mine = [
            of_batch
            for report, of_batch in zip(reports, names, strict=True)
            if not bool(torch.isfinite(report["loss_sum"]))
        ]
        named = [keys for rank in self.ranks.gather_objects(mine) for keys in rank]
        if not named:  # the gradient alone overflowed: any sample of the step may be the cause
            everyone = self.ranks.gather_objects(names)
            named = [keys for rank in everyone for keys in rank]
        # Each once: the processes of a replica name the same micro-batches.
        listed = "; ".join(dict.fromkeys(", ".join(keys) for keys in named))
        raise NonFiniteError(
            f"step {step + 1}: loss sum {result.loss_sum}, gradient norm {result.grad_norm}; "
            f"stopped before the optimizer step, no weight has changed. Samples of the "
            f"micro-batches concerned: {listed}. Look at these samples, lower optim.lr, or set "
            f"optim.max_grad_norm"
        )
