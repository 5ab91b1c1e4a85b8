"""Rules about the length of a run, its batches and what is shown of it; `rules.py` says what a rule
is and runs them."""

from __future__ import annotations

from vlmpack.recipe.export import ExportSection
from vlmpack.recipe.problems import Problem, listed_twice
from vlmpack.recipe.schema import EvaluationSection, LoggingSection, TrainingSection
from vlmpack.recipe.suggestions import suggest_value


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


def questions_are_asked(evaluation: EvaluationSection) -> list[Problem]:
    """Answers on the way are of the questions that are asked around the run."""
    if evaluation.generate_interval_steps is None or evaluation.generate:
        return []
    message = (
        f"{evaluation.generate_interval_steps}, but evaluation.generate is false, so no question "
        "is asked; set it to true, or leave generate_interval_steps out"
    )
    return [Problem(("evaluation", "generate_interval_steps"), message)]


def best_is_evaluated(evaluation: EvaluationSection, export: ExportSection) -> list[Problem]:
    """What is followed is found on the way, and what depends on it follows something."""
    best, problems = evaluation.best, []
    if best is None:
        if evaluation.patience is not None:
            message = f"{evaluation.patience}, but evaluation.best names no figure; name one"
            problems.append(Problem(("evaluation", "patience"), message))
        if export.weights == "best":
            message = "best, but evaluation.best names no figure; name one, or use last"
            problems.append(Problem(("export", "weights"), message))
        return problems
    known = ("validation_loss", *evaluation.metrics)
    if best not in known:
        message = f"'{best}' is not one of {', '.join(known)}{suggest_value(best, known)}"
        problems.append(Problem(("evaluation", "best"), message))
    elif best == "validation_loss" and evaluation.interval_steps is None:
        message = (
            f"{best}, but evaluation.interval_steps is not set, so it is known at the end only"
        )
        problems.append(Problem(("evaluation", "best"), message))
    elif best != "validation_loss" and evaluation.generate_interval_steps is None:
        message = (
            f"{best}, but evaluation.generate_interval_steps is not set, so it is known at the end "
            "only"
        )
        problems.append(Problem(("evaluation", "best"), message))
    return problems


def trackers_differ(logging: LoggingSection) -> list[Problem]:
    """A tracker is started once."""
    return listed_twice(("logging", "trackers"), logging.trackers)
