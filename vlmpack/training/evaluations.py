"""Evaluations between two steps: the validation loss, answers to the test questions, the best step.

Each is made once per step number. A signal stops a run before its step is evaluated, and the
resumed run evaluates it first.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.errors import UNREADABLE, CheckpointError, EmptyDataError
from vlmpack.packing import Batch
from vlmpack.recipe.schema import EvaluationSection
from vlmpack.training.callbacks import Callbacks
from vlmpack.training.listener import Boundary, Listener, TrainStep, is_due
from vlmpack.training.metrics import answered
from vlmpack.training.reporting import Reporting
from vlmpack.training.step import Stepper
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")

LOWER_IS_BETTER = ("validation_loss",)
"""Every other figure is a share of something right."""


def evaluated(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an evaluation, by the names that `evaluation.best` has for them."""
    loss = row.get("validation_loss")
    return answered(row) | ({"validation_loss": loss} if isinstance(loss, int | float) else {})


@dataclass(slots=True, kw_only=True)
class Validation(Listener):
    """The objective's loss over the validation split.

    Args:
        batches: makes this rank's micro-batches, the same number on every rank; None without a
            validation split.
        interval: steps between two validations; None for the end alone.
        at_start: whether there is one before the first step, to compare later ones with.
        step: of the last validation; -1 before the first.
    """

    stepper: Stepper
    batches: Callable[[], Iterable[Batch]] | None
    interval: int | None
    at_start: bool
    reporting: Reporting
    callbacks: Callbacks
    step: int = -1
    _former: int = -1

    def on_start(self, here: Boundary) -> None:
        """Validate at step 0 if asked for, and make up for a validation that a signal prevented."""
        if self.at_start if here.step == 0 else is_due(here.step, self.interval):
            self._validate(here)

    def on_step(self, step: TrainStep) -> None:
        if not step.is_stopping and is_due(step.step, self.interval):
            self._validate(step)

    def on_end(self, here: Boundary) -> None:
        self._validate(here)

    def _validate(self, here: Boundary) -> None:
        if self.batches is None or self.step == here.step:
            return
        objective, totals = self.stepper.objective, defaultdict[str, float](float)
        ACTIVITY.enter_alone("validation")
        for batch in self.batches():
            for name, value in self.stepper.evaluate([batch]).totals.items():
                totals[name] += value
        loss = objective.loss(totals)
        if loss is None:
            raise EmptyDataError(
                f"data.validation: {objective.divisor} is 0, so there is no loss. No sample of "
                "the split could be used. See data-errors.jsonl"
            )
        self._former, self.step = self.step, here.step
        here.figures["validation_loss"] = loss
        if not math.isfinite(loss):
            logger.warning("note: step %d: the validation loss is %s", here.step, loss)
        figures = {"validation_loss": loss} | {
            f"validation_{name}": value for name, value in objective.reported(totals).items()
        }
        self.reporting.validated(here.step, figures, totals)
        self.callbacks.tell("on_validation", figures)

    def undo(self, here: Boundary) -> None:
        """Forget this boundary's figures, which were not judged, so that they are made again."""
        if "validation_loss" in here.figures:
            self.step = self._former

    def state(self) -> Mapping[str, Any]:
        return {"validated_step": self.step}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.step = state["validated_step"]


@dataclass(slots=True, kw_only=True)
class Answers(Listener):
    """Answers to the test questions on the way.

    Args:
        interval: steps between two such evaluations; None for none on the way.
        ask: answers with the model as it is -> metrics by name; collective.
        step: of the last answers; -1 before the first.
    """

    reporting: Reporting
    interval: int | None
    ask: Callable[[], Mapping[str, float | None]] | None = None
    step: int = -1

    def on_start(self, here: Boundary) -> None:
        """Make up for answers that a signal prevented."""
        if here.step and is_due(here.step, self.interval):
            self._answer(here)

    def on_step(self, step: TrainStep) -> None:
        if not step.is_stopping and is_due(step.step, self.interval):
            self._answer(step)

    def on_end(self, here: Boundary) -> None:
        if self.interval is not None:
            self._answer(here)

    def _answer(self, here: Boundary) -> None:
        if self.ask is None or self.step == here.step:
            return
        shares = self.ask()
        self.step = here.step
        here.figures |= shares
        self.reporting.evaluated(here.step, {f"answers_{name}": x for name, x in shares.items()})

    def state(self) -> Mapping[str, Any]:
        return {"answered_step": self.step}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.step = state["answered_step"]


@dataclass(slots=True)
class Best(Listener):
    """The best step so far by the figure that `evaluation.best` names.

    Args:
        figure: `validation_loss`, or the name of a metric.
        patience: evaluations without a better one after which the run stops. With None it does not.
        value: the best so far; None before the first evaluation that found a number.
        step: optimizer steps taken at it.
        waited: evaluations since then.
    """

    figure: str
    patience: int | None = None
    value: float | None = None
    step: int = 0
    waited: int = 0

    @classmethod
    def of(cls, section: EvaluationSection) -> Best | None:
        return None if section.best is None else cls(section.best, section.patience)

    def on_start(self, here: Boundary) -> None:
        """Make up for a judgement that a signal prevented; step 0 is no step of the run."""
        if here.step:
            self._judge(here)

    def on_step(self, step: TrainStep) -> None:
        if not step.sums.is_skipped:
            self._judge(step)

    def on_end(self, here: Boundary) -> None:
        self._judge(here)

    def _judge(self, here: Boundary) -> None:
        here.is_best = self.judge(here.step, here.figures)
        if here.is_best:
            logger.info("step %d: %s", here.step, self.words)

    def judge(self, step: int, figures: Mapping[str, float | None]) -> bool:
        """Whether an evaluation is the best so far; the first of equal ones is.

        A figure that is not finite counts as a worse one.

        Args:
            figures: what was found; without ours it is not an evaluation.
        """
        figure = figures.get(self.figure)
        if figure is None:
            return False
        sign = -1 if self.figure in LOWER_IS_BETTER else 1
        if math.isfinite(figure) and (self.value is None or sign * figure > sign * self.value):
            self.value, self.step, self.waited = float(figure), step, 0
            return True
        self.waited += 1
        return False

    @property
    def is_spent(self) -> bool:
        """Whether the run has waited long enough."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def words(self) -> str:
        if self.value is None:
            return f"no {self.figure} yet"
        return f"best {self.figure} {self.value:.4f} at step {self.step}"

    @property
    def words_at_stop(self) -> str:
        """Why the run stops early, and how to continue it."""
        waited = counted(self.waited, "evaluation")
        return f"{self.words}, and none better in {waited} (a larger evaluation.patience goes on)"

    def to_state(self) -> dict[str, Any]:
        return {
            "figure": self.figure,
            "value": self.value,
            "step": self.step,
            "waited": self.waited,
        }

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint. If it has another figure, start anew.

        Raises:
            CheckpointError: it holds something else than a best step.
        """
        if state is None:
            return
        try:
            figure, value = state["figure"], state["value"]
            step, waited = operator.index(state["step"]), operator.index(state["waited"])
            value = None if value is None else float(value)
        except UNREADABLE as error:
            raise CheckpointError(f"the best step cannot be read: {error!r}") from error
        if figure == self.figure:
            self.value, self.step, self.waited = value, step, waited

    def state(self) -> Mapping[str, Any]:
        return {"best": self.to_state()}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.take(state.get("best"))
