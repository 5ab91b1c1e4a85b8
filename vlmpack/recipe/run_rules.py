"""Rules about the length of a run, its batches and what is shown of it; `rules.py` says what a rule
is and runs them."""

from __future__ import annotations

from vlmpack.recipe.problems import Problem, listed_twice
from vlmpack.recipe.schema import EvaluationSection, LoggingSection, TrainingSection


def one_length_of_run(training: TrainingSection) -> list[Problem]:
    """Exactly one of max_steps and num_epochs."""
    if training.max_steps is None and training.num_epochs is None:
        message = "the length of the run is missing; add 'max_steps: 1000' or 'num_epochs: 1'"
        return [Problem(("training",), message)]
    if training.max_steps is not None and training.num_epochs is not None:
        message = (
            f"{training.num_epochs}, but max_steps is set too ({training.max_steps}); "
            "keep one of them"
        )
        return [Problem(("training", "num_epochs"), message)]
    return []


def global_batch_is_whole(training: TrainingSection) -> list[Problem]:
    """A global batch is a whole number of micro-batches."""
    total, micro = training.global_batch_size, training.micro_batch_size
    if total % micro == 0:
        return []
    nearest = max(round(total / micro), 1) * micro
    message = (
        f"{total} is not a multiple of training.micro_batch_size {micro}; "
        f"use {nearest}, or a micro_batch_size that divides {total}"
    )
    return [Problem(("training", "global_batch_size"), message)]


def metrics_differ(evaluation: EvaluationSection) -> list[Problem]:
    """A metric is reported once."""
    return listed_twice(("evaluation", "metrics"), evaluation.metrics)


def trackers_differ(logging: LoggingSection) -> list[Problem]:
    """A tracker is started once."""
    return listed_twice(("logging", "trackers"), logging.trackers)
