"""The best step of a run by a figure of its evaluations, and when to stop waiting for another."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmpack.errors import UNREADABLE, CheckpointError
from vlmpack.recipe.schema import EvaluationSection
from vlmpack.training.metrics import answered
from vlmpack.words import counted

LOWER_IS_BETTER = ("validation_loss",)
"""Every other figure is a share of something right."""


def evaluated(row: Mapping[str, Any]) -> dict[str, float]:
    """What an evaluation found, by the names that `evaluation.best` has for it.

    Args:
        row: of metrics.jsonl.
    """
    loss = row.get("validation_loss")
    return answered(row) | ({"validation_loss": loss} if isinstance(loss, int | float) else {})


@dataclass(slots=True)
class Best:
    """What `evaluation.best` follows.

    Args:
        figure: `validation_loss`, or the name of a metric.
        patience: evaluations without a better one after which the run stops; None: never.
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
        """What a recipe follows, if it follows anything."""
        return None if section.best is None else cls(section.best, section.patience)

    def judge(self, step: int, figures: Mapping[str, float | None]) -> bool:
        """Whether an evaluation is the best so far; the first of equal ones is. A figure that is
        not finite is no better than any, and is waited out like a worse one.

        Args:
            step: optimizer steps taken.
            figures: what was found; without ours it is not an evaluation.
        """
        found = figures.get(self.figure)
        if found is None:
            return False
        sign = -1 if self.figure in LOWER_IS_BETTER else 1
        if math.isfinite(found) and (self.value is None or sign * found > sign * self.value):
            self.value, self.step, self.waited = float(found), step, 0
            return True
        self.waited += 1
        return False

    @property
    def is_spent(self) -> bool:
        """Whether the run has waited long enough."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def words(self) -> str:
        """What is known, for the log."""
        if self.value is None:
            return f"no {self.figure} yet"
        return f"best {self.figure} {self.value:.4f} at step {self.step}"

    @property
    def words_at_stop(self) -> str:
        """Why the run stops early, and what goes on with it."""
        waited = counted(self.waited, "evaluation")
        return f"{self.words}, and none better in {waited} (a larger evaluation.patience goes on)"

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "figure": self.figure,
            "value": self.value,
            "step": self.step,
            "waited": self.waited,
        }

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; one of another figure begins anew.

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
