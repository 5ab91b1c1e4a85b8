"""Rules about the length of a run, its batches, its processes and its log.

Rules that need `world_size` run at launch and in `vlmpack recipe check`. `rules.py` says what a
rule is.
"""

from __future__ import annotations

from vlmpack.recipe.derived import data_parallel_size
from vlmpack.recipe.messages import suggest_value
from vlmpack.recipe.problems import Problem, listed_twice
from vlmpack.recipe.schema import (
    EvaluationSection,
    ExportSection,
    LoggingSection,
    PackingSection,
    ParallelismSection,
    TrainingSection,
)
from vlmpack.words import counted


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
    knob = "interval_steps" if best == "validation_loss" else "generate_interval_steps"
    message = f"{best}, but evaluation.{knob} is not set, so it is known at the end only"
    if best not in known:
        message = f"'{best}' is not one of {', '.join(known)}{suggest_value(best, known)}"
    elif getattr(evaluation, knob) is not None:
        return []
    return [Problem(("evaluation", "best"), message)]


def trackers_differ(logging: LoggingSection) -> list[Problem]:
    """A tracker is started once."""
    return listed_twice(("logging", "trackers"), logging.trackers)


def world_splits_into_copies(parallelism: ParallelismSection, world_size: int) -> list[Problem]:
    """The processes form a whole number of model copies."""
    copy = parallelism.tensor * parallelism.pipeline * parallelism.context
    if world_size % copy == 0:
        return []
    message = (
        f"tensor {parallelism.tensor} x pipeline {parallelism.pipeline} x context "
        f"{parallelism.context} = {copy} processes per model copy, which does not divide the "
        f"world size {world_size}. Start a multiple of {copy} processes (torchrun "
        f"--nproc-per-node {copy}, recipe check --world-size {copy}), or lower one of them"
    )
    return [Problem(("parallelism",), message)]


def copies_split_the_world(parallelism: ParallelismSection, world_size: int) -> list[Problem]:
    """Each sharded copy of HSDP has the same number of processes, two or more."""
    copies = parallelism.replicate
    if copies == 1 or (world_size % copies == 0 and world_size > copies):
        return []
    fitting = [n for n in range(1, world_size // 2 + 1) if world_size % n == 0] or [1]
    message = (
        f"{copies} sharded copies over {counted(world_size, 'process', 'processes')}, but each is "
        f"sharded over an equal number of them, two or more; use {' or '.join(map(str, fitting))}"
    )
    return [Problem(("parallelism", "replicate"), message)]


def experts_split_over_processes(parallelism: ParallelismSection, world_size: int) -> list[Problem]:
    """The processes of a stage, over all copies, share the experts of its layers out evenly."""
    stage = world_size // parallelism.pipeline
    if stage % parallelism.expert == 0 or world_splits_into_copies(parallelism, world_size):
        return []
    message = (
        f"{parallelism.expert} does not divide the {stage} processes of a pipeline stage (world "
        f"size {world_size} / pipeline {parallelism.pipeline}), which share the experts out. Use a "
        f"divisor of {stage}"
    )
    return [Problem(("parallelism", "expert"), message)]


def _is_whole(parallelism: ParallelismSection, world_size: int) -> bool:
    """Whether the other two rules hold: only then is a share of the batch worth a word."""
    return not (
        world_splits_into_copies(parallelism, world_size)
        or experts_split_over_processes(parallelism, world_size)
    )


def global_batch_splits_over_copies(
    parallelism: ParallelismSection,
    training: TrainingSection,
    packing: PackingSection,
    world_size: int,
) -> list[Problem]:
    """Each model copy takes the same number of micro-batches per step.

    Under `packing.scope: batch` the number of rows is not known, and empty ones fill it up.
    """
    if packing.scope == "batch" or not _is_whole(parallelism, world_size):
        return []
    copies = data_parallel_size(parallelism, world_size)
    total, micro = training.global_batch_size, training.micro_batch_size
    if total % micro or total % (micro * copies) == 0:
        return []
    message = (
        f"{total} is not a multiple of training.micro_batch_size {micro} x data-parallel size "
        f"{copies} = {micro * copies} (world size {world_size}); use "
        f"{-(-total // (micro * copies)) * micro * copies}"
    )
    if total % copies == 0:
        message += f", or {_smaller_micro_batches(total // copies, packing)}"
    else:
        message += f", or a data-parallel size that divides {total}"
    return [Problem(("training", "global_batch_size"), message)]


def _smaller_micro_batches(of_copy: int, packing: PackingSection) -> str:
    """What micro-batches a model copy's part of the batch divides into, in words."""
    fitting = [size for size in range(packing.facts.least_samples, of_copy + 1)
               if of_copy % size == 0]  # fmt: skip
    if not fitting:  # one sample, and a row of this mode has two
        return "a packing.mode whose micro-batch may be of 1"
    return f"micro_batch_size: {' or '.join(map(str, fitting))}"
