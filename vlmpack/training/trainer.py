"""The training loop: data -> step -> metrics, with validation, checkpoints and a clean stop."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.data.loading.global_step import GlobalStep
from vlmpack.distributed.timeouts import CollectiveTimeouts
from vlmpack.errors import (
    CheckpointError,
    DataLimitError,
    EmptyDataError,
    ExtensionError,
    NonFiniteError,
    ObjectiveError,
    Preempted,
    TrainabilityError,
)
from vlmpack.packing import Batch
from vlmpack.recipe.schema import CheckpointSection
from vlmpack.training.best import Best
from vlmpack.training.callbacks import Callbacks
from vlmpack.training.checkpoint import (
    CheckpointContent,
    Saver,
    load_checkpoint,
    random_state,
    restore_random_state,
)
from vlmpack.training.metrics import TRACKED
from vlmpack.training.model_watch import check_trained_from
from vlmpack.training.record import SampleRecord, StepSamples
from vlmpack.training.remarks import Remarks
from vlmpack.training.reporting import Reporting, Totals, step_row
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import Stepper, StepSums
from vlmpack.training.stop import StopFlag

logger = logging.getLogger("vlmpack")


_OF_ALL_RANKS = (NonFiniteError, TrainabilityError, DataLimitError)
"""Errors that are raised on all ranks alike, so that a checkpoint can still be published."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Runs one rank of a training run.

    Args:
        stepper: the engine and its schedule.
        total_steps: optimizer steps of the whole run.
        checkpoint: when the state is saved, and how many are kept.
        validation_interval: steps between validations; None for the end alone.
        validate_first: whether there is one before the first step, to compare later ones with.
        log_interval: steps between tracker calls.
        timeouts: how long a rank waits for the others.
        run_dir: where checkpoints and metrics go.
        stop: set by SIGTERM.
        validation: makes this rank's validation micro-batches, the same number on every rank;
            None without a validation split.
        on_skips: called after every step with the samples planned in it and the skipped ones, over
            all ranks; raises where the budget is spent.
        record: where this replica's lead writes down what was trained.
        model: digests of the model folder's parts; checkpoints hold them.
        callbacks: what the program is told on the way.
        answer: answers the test questions with the model as it is -> metrics by name; collective.
        answer_interval: steps between two such evaluations; None for none on the way.
        best: which step is the best one, and when to stop.
        stopped_by: the callback that asked for the end of the run.
    """

    stepper: Stepper
    total_steps: int
    checkpoint: CheckpointSection
    validation_interval: int | None
    log_interval: int
    timeouts: CollectiveTimeouts
    run_dir: RunDir
    stop: StopFlag
    validation: Callable[[], Iterable[Batch]] | None = None
    on_skips: Callable[[int, int], None] | None = None
    record: SampleRecord | None = None
    model: Mapping[str, str] = field(default_factory=dict)
    validate_first: bool = False
    callbacks: Callbacks | None = None
    answer: Callable[[], Mapping[str, float | None]] | None = None
    answer_interval: int | None = None
    best: Best | None = None
    stopped_by: str | None = None
    totals: Totals = field(default_factory=Totals)
    _saved_step: int = -1
    _validated_step: int = -1
    _answered_step: int = -1
    _saver: Saver = field(init=False)
    _remarks: Remarks = field(init=False)

    def __post_init__(self) -> None:
        self._saver = Saver(
            self.run_dir.checkpoints,
            self.stepper.ranks,
            keep=self.checkpoint.keep,
            published=self._published,
        )
        self._remarks = Remarks(self.stepper.objective, self.stepper.ranks)

    def _published(self, step: int, folder: Path) -> None:
        self._saved_step = max(self._saved_step, step)
        self.tell("on_checkpoint", step=step, folder=folder)

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
        self._validated_step = state["validated_step"]
        self._answered_step = state["answered_step"]
        asked, of_steps = state["stopped"] or (None, None)
        self.stopped_by = asked if of_steps == self.total_steps else None  # a longer run goes on
        if self.best is not None:
            self.best.take(state.get("best"))
        logger.info("resumed from %s at step %d", folder, self.totals.step)

    def run(self, steps: Iterator[GlobalStep], reporting: Reporting | None) -> None:
        """Train until `total_steps`.

        Args:
            steps: the data from the current step on.
            reporting: where figures go, on the main rank.

        Raises:
            Preempted: SIGTERM was honoured at a step boundary.
            ExtensionError: a callback or a metric of the program failed; the steps are saved.
            NonFiniteError, TrainabilityError, DataError, DataLimitError, CheckpointError: see
                their classes.
        """
        if reporting is not None:
            reporting.progress.start(self.totals.step)
        try:
            self._run(steps, reporting)
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
            self._saver.abandon()

    def _finish(self) -> None:
        """Publish what is still being written of a run that has failed; what goes wrong there is
        said, and takes nothing from the cause of the end. Collective."""
        try:
            self._saver.finish()
        except (CheckpointError, ExtensionError, NonFiniteError) as error:
            logger.warning("at the end of a run that failed: %s", error)

    def _keep(self, fault: ExtensionError) -> ExtensionError:
        """Save the steps that a fault of the program has ended; no callback is told of it, as that
        one may be the fault. Collective.

        Returns:
            The same fault, and from where the run goes on.
        """
        self.callbacks = None
        step = self.totals.step
        whence = f"from step {step}, which is saved" if step else "with the run"
        try:
            self._saver.finish()
            if step:
                self.save(last=True)
        except (CheckpointError, NonFiniteError) as error:
            whence = (
                "from the checkpoint before, or begins anew where there is none, as step "
                f"{step} could not be saved: {error}"
            )
        return fault.going_on(whence)

    def _run(self, steps: Iterator[GlobalStep], reporting: Reporting | None) -> None:
        begun = ACTIVITY.step = self.totals.step
        if self.validate_first and begun == 0:
            self.validate(reporting)
        if begun:  # a signal stops a run at once: what was due at its step is still to be done
            self._evaluate(reporting)
        while self.totals.step < self.total_steps and not (
            self.stopped_by or self.is_stopped_early
        ):
            with self.timeouts.of_step(is_first=self.totals.step == begun):
                sums, row = self._one_step(steps, reporting)
            self.tell("on_step", row)
            stopping = sums.stop_votes > 0
            if sums.num_writing == 0:
                self._saver.finish()  # as long as any save may take
            is_best = not stopping and self._evaluate(reporting)
            if stopping or is_best or _due(self.totals.step, self.checkpoint.interval_steps):
                self.save(last=stopping or self.totals.step == self.total_steps)
            if stopping and self.totals.step < self.total_steps:
                raise Preempted(
                    f"stopped at step {self.totals.step} of {self.total_steps} on SIGTERM; "
                    f"the same command resumes from {self.run_dir.checkpoints}"
                )
        if self.is_stopped_early and self.best is not None:
            logger.info("stopped at step %d: %s", self.totals.step, self.best.words_at_stop)
        if self.stopped_by is not None:
            step, total = self.totals.step, self.total_steps
            logger.info("stopped at step %d of %d: %s asked for it", step, total, self.stopped_by)
        self._evaluate(reporting, last=True)
        if self.totals.step:
            self.save(last=True)

    @property
    def is_stopped_early(self) -> bool:
        """Whether the run has waited long enough for a better evaluation, before its last step."""
        waited = self.best is not None and self.best.is_spent
        return waited and self.totals.step < self.total_steps

    def _evaluate(self, reporting: Reporting | None, *, last: bool = False) -> bool:
        """What is due at this step, and whether it is the best so far. Collective."""
        figures: dict[str, float | None] = {}
        before = self._validated_step, self._answered_step
        try:
            if last or _due(self.totals.step, self.validation_interval):
                figures["validation_loss"] = self.validate(reporting)
            if self.answer_interval and (last or _due(self.totals.step, self.answer_interval)):
                figures |= self._answer(reporting)
        except ExtensionError:  # all of it is made again, as the best one is not judged yet
            self._validated_step, self._answered_step = before
            raise
        is_best = self.best is not None and self.best.judge(self.totals.step, figures)
        if is_best and self.best is not None:
            logger.info("step %d: %s", self.totals.step, self.best.words)
        return is_best

    def _answer(self, reporting: Reporting | None) -> Mapping[str, float | None]:
        """Metrics of the answers to the test questions; once per step number."""
        if self.answer is None or self._answered_step == self.totals.step:
            return {}
        found = self.answer()
        self._answered_step = self.totals.step
        if reporting is not None:
            figures = {f"answers_{name}": value for name, value in found.items()}
            reporting.metrics.write({"step": self.totals.step, **figures})
            reporting.trackers.log(figures, self.totals.step)
        return found

    def _one_step(
        self, steps: Iterator[GlobalStep], reporting: Reporting | None
    ) -> tuple[StepSums, dict[str, Any]]:
        """Train one step, and report it; the row of metrics.jsonl, which the main rank has."""
        started = time.perf_counter()
        ACTIVITY.step = self.totals.step + 1
        ACTIVITY.enter("waiting for data")
        data = next(steps)
        waited = time.perf_counter() - started
        step, samples = self.totals.step, StepSamples.of(data)
        sums, phases = self.stepper.train(
            step,
            [micro_batch.batch for micro_batch in data.micro_batches],
            names=samples.names,
            num_skipped=len(data.skipped),
            stop=self.stop.is_set(),
            writing=self._saver.is_writing,
        )
        seconds = time.perf_counter() - started
        self.totals.add(sums, seconds, data.state.to_json())
        self._remarks.say(self.totals.step, sums.totals, data, samples)
        if self.record is not None:
            self.record.write(samples)
        if self.on_skips is not None:
            self.on_skips(data.num_samples, sums.num_skipped)
        written: dict[str, Any] = {}
        if reporting is not None:
            phases |= {"seconds": seconds, "data_wait_seconds": waited}
            row = step_row(self.stepper, step, data, sums, phases)
            written = row.as_row()
            reporting.metrics.write(written)
            reporting.progress.update(row)
            if _due(self.totals.step, self.log_interval):
                self._remarks.say_sources(self.totals.step, sums.totals)
                tracked = {name: getattr(row, name) for name in TRACKED}
                reporting.trackers.log(tracked | dict(row.reported), self.totals.step)
        return sums, written

    def tell(
        self,
        hook: str,
        figures: Mapping[str, Any] = MappingProxyType({}),
        *,
        step: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Tell the program's callbacks, if there are some. Collective then. The others wait for the
        main rank, for as long as its callbacks take."""
        if self.callbacks is None or not self.callbacks.listen(hook):
            return
        with ACTIVITY.during(f"callbacks: {hook}", ()), self.timeouts.of_callbacks():
            step = self.totals.step if step is None else step
            asks = self.callbacks.tell(hook, step, figures, folder)
        if self.totals.step < self.total_steps:
            self.stopped_by = self.stopped_by or asks

    def validate(self, reporting: Reporting | None) -> float | None:
        """The objective's loss over the validation split; once per step number."""
        if self.validation is None or self._validated_step == self.totals.step:
            return None
        objective, totals = self.stepper.objective, defaultdict[str, float](float)
        ACTIVITY.enter_alone("validation")
        for batch in self.validation():
            for name, value in self.stepper.evaluate([batch]).totals.items():
                totals[name] += value
        loss = objective.loss(totals)
        if loss is None:
            raise EmptyDataError(
                f"data.validation: {objective.divisor} is 0, so there is no loss: no sample of the "
                "split could be used; see data-errors.jsonl"
            )
        self._validated_step = self.totals.step
        if not math.isfinite(loss):
            logger.warning("note: step %d: the validation loss is %s", self.totals.step, loss)
        figures = {"validation_loss": loss} | {
            f"validation_{name}": value for name, value in objective.reported(totals).items()
        }
        if reporting is not None:
            labels = int(totals["num_label_tokens"])
            reporting.metrics.write(
                {"step": self.totals.step, **figures, "validation_label_tokens": labels}
            )
            reporting.trackers.log(figures, self.totals.step)
            asked = [(name, figures[f"validation_{name}"]) for name in objective.shown]
            shown = "".join(f", {n} {'-' if x is None else f'{x:.4f}'}" for n, x in asked)
            logger.info("step %d: validation loss %.4f%s", self.totals.step, loss, shown)
            self._remarks.say_sources(self.totals.step, totals, "validation of ")
        self.tell("on_validation", figures)
        return loss

    def save(self, *, last: bool) -> None:
        """Write a checkpoint of the current step, unless there is one. Collective.

        Args:
            last: training does not go on after it, so it is waited for.

        Raises:
            CheckpointError: it, or the one that was still being written, could not be written.
            NonFiniteError: one of them would hold values that are no numbers.
        """
        if self._saved_step == self.totals.step:
            return
        if self.record is not None:
            self.record.sync()
        ACTIVITY.enter_alone("saving a checkpoint")
        engine = self.stepper.engine
        content = CheckpointContent(
            step=self.totals.step,
            state=self._state(),
            random=random_state(),
            shapes=engine.parameter_shapes(),
            optimizer_steps=engine.optimizer_steps,
            spared=None if self.best is None or self.best.value is None else self.best.step,
        )
        if self.checkpoint.asynchronous and not last:
            self._saver.save_in_background(content, engine.owned_slices)
        else:
            self._saver.save(content, engine.owned_slices)
        self._saved_step = self.totals.step

    def _state(self) -> dict[str, Any]:
        totals = self.totals
        return {
            "totals": {name: getattr(totals, name) for name in Totals.__slots__},
            "validated_step": self._validated_step,
            "answered_step": self._answered_step,
            "best": None if self.best is None else self.best.to_state(),
            "stopped": self.stopped_by and (self.stopped_by, self.total_steps),
            "world_size": self.stepper.ranks.world_size,
            "model": dict(self.model),
        }


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
