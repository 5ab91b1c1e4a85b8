"""The interface of listeners to a run's steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmpack.data.loading.loader import GlobalStep
from vlmpack.training.step import StepSums


@dataclass(slots=True, kw_only=True)
class Boundary:
    """Where a run stands between two steps.

    Args:
        figures: what evaluations found here, by the names that `evaluation.best` has for it.
    """

    step: int
    figures: dict[str, float | None] = field(default_factory=dict)
    is_best: bool = False


@dataclass(slots=True, kw_only=True)
class TrainStep(Boundary):
    """The boundary after an optimizer step, and what is known of that step.

    Args:
        seconds: of the whole step and of its phases, as StepRow names them.
        row: of metrics.jsonl, once it is written; the main rank alone has it.
    """

    data: GlobalStep
    sums: StepSums
    seconds: Mapping[str, float]
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_stopping(self) -> bool:
        """Whether a rank was asked to stop (SIGTERM); nothing long may begin then."""
        return self.sums.stop_votes > 0


def is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


class Listener:
    """Looks at a run from the side. A subclass writes the methods that it needs.

    All ranks have the same listeners and call them in the same order, so each may be collective.
    """

    def on_start(self, here: Boundary) -> None:
        """A launch is about to take its first step."""

    def on_step(self, step: TrainStep) -> None:
        """An optimizer step was taken."""

    def on_end(self, here: Boundary) -> None:
        """The last step of the run was taken."""

    def on_save(self) -> None:
        """A checkpoint is about to be written. An error of all ranks alike leaves it unwritten."""

    def on_saved(self, step: int, folder: Path) -> None:
        """A checkpoint was written whole."""

    def undo(self, here: Boundary) -> None:
        """Undo what the run that resumes here must do again. Called if code of the program failed
        at a boundary before all listeners were called there."""

    def state(self) -> Mapping[str, Any]:
        """The state for a checkpoint, JSON-able. No two listeners share a key."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint, which holds that of all listeners."""

    def close(self) -> None:
        """The run is over, or has failed."""
