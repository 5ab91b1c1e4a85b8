"""What a run does beside its steps, from a run of two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmpack.forecast.measure.launched import Tell, whole_run
from vlmpack.forecast.measured import Stage
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.recipe.show import dump_recipe
from vlmpack.training.run_dir import RunDir

STEPS = 2
"""Optimizer steps of the short run."""
MOST_QUESTIONS = 64
"""Answered, and samples validated, in the short run; rounded up to a whole batch of each process.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the whole run has.

    Args:
        steps: of training.
        questions: answered each time.
        validated: samples of each validation.
    """

    steps: int
    questions: int
    validated: int


def measured_stages(
    recipe: Recipe, processes: int, counts: Counts, tell: Tell
) -> tuple[Stage, ...]:
    """Launch, validations, answers, checkpoints, export: how often, and how long each.

    Args:
        recipe: with a `run_dir` of its own, which does not exist yet.
        processes: that run it.
        counts: of the whole run.
        tell: that it stands still.

    Raises:
        MeasuredRunError: the short run failed.
    """
    few = _few(recipe.evaluation.batch_size * processes)
    short = {
        "training.max_steps": STEPS,
        "training.num_epochs": None,
        "optim.warmup_steps": 0,
        "evaluation.interval_steps": None,
        "evaluation.generate_interval_steps": None,
        "evaluation.best": None,
        "evaluation.patience": None,
        "evaluation.max_samples": min(few, counts.validated or few),
        "evaluation.generate_max_samples": min(few, counts.questions or few),
        "export.weights": "last",
        "checkpoint.interval_steps": None,
    }
    run_dir = Path(recipe.run_dir)
    wall = whole_run(dump_recipe(load_recipe(recipe, short)), run_dir, processes, tell)
    written = RunDir(run_dir).final_figures()
    spent: Mapping[str, float] = written["seconds_of_launch"]
    return _stages(recipe, counts, spent, wall - float(written["train_seconds"]), few)


def _few(batch_size: int) -> int:
    """Samples that fill batches of so many."""
    return -(-MOST_QUESTIONS // batch_size) * batch_size


def _stages(
    recipe: Recipe, counts: Counts, spent: Mapping[str, float], beside: float, few: int
) -> tuple[Stage, ...]:
    """The stages of the whole run.

    Args:
        recipe: its own intervals.
        counts: of the whole run.
        spent: seconds by phase of the short run, which answered twice and validated at its end.
        beside: its seconds outside of training steps.
        few: samples that it validated or answered at most.
    """
    evaluation, steps = recipe.evaluation, counts.steps
    validation, begins = spent.get("validation", 0.0), spent.get("validation: its first batch", 0.0)
    answers = spent.get("answering questions", 0.0)
    checkpoint = spent.get("saving a checkpoint", 0.0) + spent.get("publishing a checkpoint", 0.0)
    export = spent.get("exporting the model", 0.0)
    stages = [
        Stage(
            what="launch",
            times=1,
            seconds=beside - begins - validation - answers - checkpoint - export,
        )
    ]
    if counts.validated:
        times = _times(steps, evaluation.interval_steps) + recipe.objective.learns_pairs
        measured = 1 + recipe.objective.learns_pairs
        share = counts.validated / min(few, counts.validated)
        each = (begins + validation * share) / measured
        stages.append(Stage(what="validation", times=times, seconds=each))
    if counts.questions:
        share = counts.questions / min(few, counts.questions)
        interval = evaluation.generate_interval_steps
        times = 2 if interval is None else 1 + _times(steps, interval)
        stages.append(Stage(what="answers", times=times, seconds=answers / 2 * share))
    interval = None if recipe.checkpoint.asynchronous else recipe.checkpoint.interval_steps
    stages.append(Stage(what="checkpoint", times=_times(steps, interval), seconds=checkpoint))
    if recipe.export.enabled:
        stages.append(Stage(what="export", times=1, seconds=export))
    return tuple(stages)


def _times(steps: int, interval: int | None) -> int:
    """How often something is done each `interval` steps and at the end."""
    return 1 if interval is None else -(-steps // interval)
