"""What a run counts over its launches, and where its figures go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlmpack.data.loading.global_step import GlobalStep
from vlmpack.training.metrics import MetricsLog, Progress, StepRow
from vlmpack.training.step import Stepper, StepSums
from vlmpack.training.trackers import Trackers


@dataclass(slots=True)
class Totals:
    """Counters of the whole run, over all its launches.

    Args:
        step: optimizer steps taken.
        num_tokens: real tokens trained.
        num_slots: slots computed.
        num_padded_slots: slots that mode `none` computes for the same micro-batches.
        num_samples: samples trained.
        num_skipped: samples left out.
        train_seconds: seconds spent in steps, validation and saving left out.
        data_state: JSON text of the data state.
    """

    step: int = 0
    num_tokens: int = 0
    num_slots: int = 0
    num_padded_slots: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    train_seconds: float = 0.0
    data_state: str | None = None

    def add(self, sums: StepSums, seconds: float, data_state: str) -> None:
        """Count one step."""
        self.step += 1
        self.num_tokens += sums.num_tokens
        self.num_slots += sums.num_slots
        self.num_padded_slots += sums.num_padded_slots
        self.num_samples += sums.num_samples
        self.num_skipped += sums.num_skipped
        self.train_seconds += seconds
        self.data_state = data_state


@dataclass(slots=True, kw_only=True)
class Reporting:
    """Where a run's figures go; only the main rank has any.

    Args:
        metrics: metrics.jsonl.
        progress: the live line.
        trackers: experiment trackers.
    """

    metrics: MetricsLog
    progress: Progress
    trackers: Trackers

    def close(self) -> None:
        """Finish all of them."""
        self.progress.stop()
        self.metrics.close()
        self.trackers.close()


def step_row(
    stepper: Stepper, step: int, data: GlobalStep, sums: StepSums, seconds: Mapping[str, float]
) -> StepRow:
    """What is reported of a step.

    Args:
        stepper: took it.
        step: steps taken before it.
        data: trained in it.
        sums: over all ranks.
        seconds: of the whole step and of its phases, as StepRow names them.
    """
    return StepRow(
        step=step + 1,
        epoch=data.epoch,
        loss=sums.loss,
        loss_divisor=stepper.objective.divided_by(sums.totals),
        grad_norm=sums.grad_norm,
        learning_rate=stepper.schedule(step),
        num_tokens=sums.num_tokens,
        num_shared_tokens=sums.num_shared_tokens,
        num_shared_patches=sums.num_shared_patches,
        num_slots=sums.num_slots,
        num_padded_slots=sums.num_padded_slots,
        num_label_tokens=sums.num_label_tokens,
        num_samples=sums.num_samples,
        num_skipped=sums.num_skipped,
        num_rows=data.num_rows,
        num_eager_rows=sums.num_eager_rows,
        imbalance=data.imbalance,
        read_seconds=sum(micro.read_seconds for micro in data.micro_batches),
        encode_seconds=sum(micro.encode_seconds for micro in data.micro_batches),
        reported=stepper.reported(sums),
        **seconds,
    )
