"""The training loop: data -> step -> listeners -> checkpoint, with a clean stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.data.loading.loader import GlobalStep
from vlmpack.data.plan.state import DataState
from vlmpack.distributed.ranks import CollectiveTimeouts
from vlmpack.errors import (
    CheckpointError,
    DataLimitError,
    ExtensionError,
    NonFiniteError,
    ObjectiveError,
    Preempted,
    ReplicaError,
    SentinelError,
    TrainabilityError,
)
from vlmpack.recipe.schema import CheckpointSection
from vlmpack.training.bad_steps import BadSteps
from vlmpack.training.callbacks import Callbacks
from vlmpack.training.checkpoint import (
    CheckpointContent,
    Saver,
    load_checkpoint,
    random_state,
    restore_random_state,
)
from vlmpack.training.evaluations import Answers, Best, Validation
from vlmpack.training.listener import Boundary, Listener, TrainStep, is_due
from vlmpack.training.model_watch import check_trained_from
from vlmpack.training.reporting import Remarks, Reporting
from vlmpack.training.step import NonFiniteStep, Stepper, StepSums
from vlmpack.training.stop import StopFlag

logger = logging.getLogger("vlmpack")


_OF_ALL_RANKS = (
    NonFiniteError,
    ReplicaError,
    SentinelError,
    TrainabilityError,
    DataLimitError,
)
"""Errors that are raised on all ranks alike, so that a checkpoint can still be published."""


@dataclass(slots=True)
class Totals:
    """Counters of the whole run, over all its launches.

    Args:
        num_padded_slots: slots that mode `none` computes for the same micro-batches.
        num_skipped_steps: of `step`, those that were not finite; `num_skipped` counts samples.
        train_seconds: seconds spent in steps, validation and saving left out.
        data_state: JSON text of the data state.
    """

    step: int = 0
    num_tokens: int = 0
    num_slots: int = 0
    num_padded_slots: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    num_skipped_steps: int = 0
    train_seconds: float = 0.0
    data_state: str | None = None

    def add(self, sums: StepSums, seconds: float, data_state: DataState) -> None:
        self.step += 1
        self.num_tokens += sums.num_tokens
        self.num_slots += sums.num_slots
        self.num_padded_slots += sums.num_padded_slots
        self.num_samples += sums.num_samples
        self.num_skipped += sums.num_skipped
        self.num_skipped_steps += sums.is_skipped
        self.train_seconds += seconds
        self.data_state = data_state.to_json()


@dataclass(slots=True, frozen=True)
class Publication(Listener):
    """Publishes a checkpoint that was written in the background, once no rank writes at it."""

    saver: Saver

    def on_step(self, step: TrainStep) -> None:
        """Publish the checkpoint, which may take as long as any save."""
        if step.sums.num_writing == 0:
            self.saver.finish()


@dataclass(slots=True, kw_only=True)
class Listeners:
    """The listeners of a run, in the order in which each step reaches them.

    The step is saved after all of them, if it is due, the best, or the last before a stop.
    """

    replicas: Listener = field(default_factory=Listener)
    """Whether ranks that should hold the same do; the end of a run where they do not."""
    remarks: Remarks
    """What the objective's counts mean, in the log."""
    record: Listener = field(default_factory=Listener)
    """The samples that were trained, in `samples/`."""
    skips: Listener
    """Samples left out: the log, and the end of a run that leaves out too many."""
    spikes: Listener = field(default_factory=Listener)
    """Losses and gradient norms far above those before, in the log."""
    reporting: Reporting
    """metrics.jsonl, the live line, experiment trackers."""
    callbacks: Callbacks
    """The program's `on_step`, after its data are on disk."""
    publication: Publication
    """A checkpoint of a step before that is written by now, and `on_checkpoint`."""
    validation: Validation
    """The validation loss, and `on_validation`."""
    answers: Answers
    """Answers to the test questions, and `on_answers`."""
    best: Best | None
    """Whether this step is the best, by the figures of the two before."""

    bad_steps: BadSteps | None = None
    """Steps that are not finite; None for a run that ends at the first."""

    def __iter__(self) -> Iterator[Listener]:
        listeners = (getattr(self, entry.name) for entry in fields(self))
        return (listener for listener in listeners if listener is not None)


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Runs one rank of a training run.

    Args:
        timeouts: how long a rank waits for the others.
        model: digests of the model folder's parts; checkpoints hold them.
    """

    stepper: Stepper
    total_steps: int
    checkpoint: CheckpointSection
    saver: Saver
    timeouts: CollectiveTimeouts
    stop: StopFlag
    listeners: Listeners
    model: Mapping[str, str] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    _saved_step: int = -1

    def __post_init__(self) -> None:
        self.saver.published = self._published
        self.stepper.before_update = self.saver.wait_for_copy

    def _published(self, step: int, folder: Path) -> None:
        self._saved_step = max(self._saved_step, step)
        for listener in self.listeners:
            listener.on_saved(step, folder)

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint that verifies; each rank reads what it holds.

        Raises:
            CheckpointError: it does not fit this model.
            RunIdentityError: it was trained from another model.
        """
        state, random = load_checkpoint(folder, self.stepper.engine, self.stepper.ranks)
        check_trained_from(folder, state["model"], self.model)
        restore_random_state(random)
        self.totals = Totals(**state["totals"])
        self._saved_step = self.totals.step
        for listener in self.listeners:
            listener.resume(state)
        logger.info("resumed from %s at step %d", folder, self.totals.step)

    def run(self, steps: Iterator[GlobalStep]) -> None:
        """Train until `total_steps`.

        Args:
            steps: the data from the current step on.

        Raises:
            Preempted: SIGTERM was honoured at a step boundary.
            ExtensionError: a callback or a metric of the program failed; the steps are saved.
            NonFiniteError, ReplicaError, TrainabilityError, DataError, DataLimitError,
                CheckpointError: see their classes.
        """
        try:
            self._run(steps)
        except ObjectiveError:
            if self.stepper.ranks.world_size == 1:  # others are in this step, and come to no other
                self._finish()
            raise
        except ExtensionError as error:  # a callback's or a metric's: all ranks are between steps
            raise self._keep(error) from None
        except _OF_ALL_RANKS:
            self._finish()
            raise
        finally:
            self.saver.abandon()

    def _finish(self) -> None:
        """Publish a running save after a failure, and log its own faults. Collective."""
        try:
            self.saver.finish()
        except (CheckpointError, ExtensionError, NonFiniteError) as error:
            logger.warning("at the end of a run that failed: %s", error)

    def _keep(self, fault: ExtensionError) -> ExtensionError:
        """Save the steps before a program's fault, without callbacks: the fault may be theirs.

        Returns the fault with the place where the run continues. Collective.
        """
        self.listeners.callbacks.mute()
        step = self.totals.step
        whence = f"from step {step}, which is saved" if step else "with the run"
        try:
            self.saver.finish()
            if step:
                self.save(last=True)
        except (CheckpointError, NonFiniteError, ReplicaError) as error:
            whence = (
                "from the checkpoint before, or begins anew where there is none, as step "
                f"{step} could not be saved: {error}"
            )
        return fault.going_on(whence)

    def _run(self, steps: Iterator[GlobalStep]) -> None:
        first = ACTIVITY.step = self.totals.step
        self._tell("on_start", Boundary(step=first))
        while self.totals.step < self.total_steps and not (
            self.stopped_by or self.is_stopped_early
        ):
            with self.timeouts.of_step(is_first=self.totals.step == first):
                step = self._train(steps)
            self._tell("on_step", step)
            interval = self.checkpoint.interval_steps
            if step.is_stopping or step.is_best or is_due(step.step, interval):
                self.save(last=step.is_stopping or step.step == self.total_steps)
            if step.is_stopping and step.step < self.total_steps:
                raise Preempted(
                    f"stopped at step {step.step} of {self.total_steps} on SIGTERM; saved "
                    f"checkpoint step {step.step} in {self.saver.root}. The same command resumes "
                    "from it"
                )
        if self.is_stopped_early and self.listeners.best is not None:
            words = self.listeners.best.words_at_stop
            logger.info("stopped at step %d: %s", self.totals.step, words)
        if self.stopped_by is not None:
            step_now, total = self.totals.step, self.total_steps
            logger.info(
                "stopped at step %d of %d: %s asked for it", step_now, total, self.stopped_by
            )
        self._tell("on_end", Boundary(step=self.totals.step))
        if self.totals.step:
            self.save(last=True)

    def _train(self, steps: Iterator[GlobalStep]) -> TrainStep:
        started = time.perf_counter()
        ACTIVITY.step = self.totals.step + 1
        ACTIVITY.enter("waiting for data")
        data = next(steps)
        waited = time.perf_counter() - started
        try:
            sums, phases = self.stepper.train(
                self.totals.step,
                [micro_batch.batch for micro_batch in data.micro_batches],
                names=data.names,
                num_skipped=len(data.skipped),
                stop=self.stop.is_set(),
                writing=self.saver.is_writing,
            )
        except NonFiniteStep as found:
            if self.listeners.bad_steps is None:
                raise
            sums = self.listeners.bad_steps.judge(found, data, self.totals.step + 1)
            phases = {"forward_backward_seconds": found.seconds, "optimizer_seconds": 0.0}
        seconds = time.perf_counter() - started
        self.totals.add(sums, seconds, data.state)
        phases |= {"seconds": seconds, "data_wait_seconds": waited}
        return TrainStep(step=self.totals.step, data=data, sums=sums, seconds=phases)

    def _tell(self, hook: str, here: Boundary) -> None:
        try:
            for listener in self.listeners:
                getattr(listener, hook)(here)
        except ExtensionError:
            for listener in self.listeners:
                listener.undo(here)
            raise

    @property
    def stopped_by(self) -> str | None:
        return self.listeners.callbacks.stopped_by

    @property
    def is_stopped_early(self) -> bool:
        """Whether the run has waited long enough for a better evaluation."""
        best = self.listeners.best
        return best is not None and best.is_spent and self.totals.step < self.total_steps

    def save(self, *, last: bool) -> None:
        """Write a checkpoint of the current step, unless there is one. Collective.

        Args:
            last: training ends after it, so it is waited for.

        Raises:
            CheckpointError: this checkpoint, or one still in progress, could not be written.
            NonFiniteError: one of them would hold values that are not finite.
            ReplicaError: ranks that should hold the same do not.
        """
        if self._saved_step == self.totals.step:
            return
        for listener in self.listeners:
            listener.on_save()
        ACTIVITY.enter_alone("saving a checkpoint")
        engine, best, bad = self.stepper.engine, self.listeners.best, self.listeners.bad_steps
        is_over = self.totals.step == self.total_steps or self.is_stopped_early
        content = CheckpointContent(
            step=self.totals.step,
            state=self._state(),
            random=random_state(),
            shapes=engine.parameter_shapes(),
            optimizer_steps=engine.optimizer_steps,
            spared=None if best is None or best.value is None else best.step,
            dumped=() if bad is None or is_over else bad.dumped(),
        )
        if self.checkpoint.asynchronous and not last:
            self.saver.save_in_background(content, engine.owned_slices)
        else:
            self.saver.save(content, engine.owned_slices)
        self._saved_step = self.totals.step

    def _state(self) -> dict[str, Any]:
        totals = self.totals
        state: dict[str, Any] = {
            "totals": {name: getattr(totals, name) for name in Totals.__slots__},
            "best": None,
            "world_size": self.stepper.ranks.world_size,
            "model": dict(self.model),
        }
        for listener in self.listeners:
            state |= listener.state()
        return state
