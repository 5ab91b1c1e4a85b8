"""What `vlmpack plan --measure` found, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpeed:
    """A mean step of the run.

    Args:
        measured_steps: that the figures are from; those before, which warm up and find their data
            read ahead, are left out.
        seconds: of a step, data wait included.
        data_wait_seconds: of these, waited for the loader.
        slots: tokens and padding that a mean measured step computed, over all processes.
        tokens: real ones among them, as each sample has them alone.
    """

    measured_steps: int
    seconds: float
    data_wait_seconds: float
    slots: float
    tokens: float

    @property
    def data_wait_share(self) -> float:
        """Share of a step that is waited for the loader."""
        return self.data_wait_seconds / max(1e-9, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChoice:
    """One way to run the recipe that changes no loss.

    Args:
        change: `KEY=VALUE` of the recipe; empty for the recipe as it is.
        speed: of a mean step of the run; None where it could not be measured.
        training_seconds: of all steps of the run; None as `speed`.
        passes: how often it was measured.
        failure: why there is none.
    """

    change: str
    speed: StepSpeed | None
    training_seconds: float | None
    passes: int = 1
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of work beside the training steps.

    Args:
        what: in words.
        times: that the run does it.
        seconds: of each.
    """

    what: str
    times: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFigures:
    """The time of a run, predicted.

    Args:
        device: on which the steps ran, in words.
        processes: that ran them; `copies` of the model among them, of `all_copies` of the run.
        run_steps: of the whole run.
        choices: the recipe as it is, and others; the fastest first.
        stages: what the run does beside its steps.
        spread: the largest difference between two measurements of one setting, relative: settings
            that are closer are not told apart; None where nothing was measured twice.
        notes: what is not in these figures.
    """

    device: str
    processes: int
    copies: int
    all_copies: int
    run_steps: int
    choices: tuple[MeasuredChoice, ...]
    stages: tuple[Stage, ...]
    spread: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def own(self) -> MeasuredChoice:
        """The recipe as it is."""
        return next(choice for choice in self.choices if not choice.change)

    @property
    def seconds(self) -> float:
        """The whole run, as the recipe is."""
        beside = sum(stage.times * stage.seconds for stage in self.stages)
        return (self.own.training_seconds or 0.0) + beside
