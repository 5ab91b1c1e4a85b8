"""Rules that need the number of processes; checked at launch, and by `vlmpack recipe check`."""

from __future__ import annotations

from collections.abc import Mapping

from vlmpack.errors import RecipeError
from vlmpack.recipe.derived import data_parallel_size
from vlmpack.recipe.problems import Document, Problem, render
from vlmpack.recipe.schema import PackingSection, ParallelismSection, Recipe, TrainingSection


def world_splits_into_copies(parallelism: ParallelismSection, world_size: int) -> list[Problem]:
    """The processes form a whole number of model copies."""
    copy = parallelism.tensor * parallelism.pipeline * parallelism.context
    if world_size % copy == 0:
        return []
    message = (
        f"tensor {parallelism.tensor} x pipeline {parallelism.pipeline} x context "
        f"{parallelism.context} = {copy} processes per model copy, which does not divide the "
        f"world size {world_size}; start a multiple of {copy} processes (torchrun --nproc-per-node "
        f"{copy} ...; recipe check: --world-size {copy}), or lower one of them"
    )
    return [Problem(("parallelism",), message)]


def experts_split_over_processes(parallelism: ParallelismSection, world_size: int) -> list[Problem]:
    """The processes of a stage, over all copies, share the experts of its layers out evenly."""
    stage = world_size // parallelism.pipeline
    if stage % parallelism.expert == 0:
        return []
    message = (
        f"{parallelism.expert} does not divide the {stage} processes of a pipeline stage (world "
        f"size {world_size} / pipeline {parallelism.pipeline}), which share the experts out; use a "
        f"divisor of {stage}"
    )
    return [Problem(("parallelism", "expert"), message)]


def global_batch_splits_over_copies(
    parallelism: ParallelismSection,
    training: TrainingSection,
    packing: PackingSection,
    world_size: int,
) -> list[Problem]:
    """Each model copy takes the same number of micro-batches per step. Under `packing.scope: batch`
    nobody knows how many rows a global batch has, and empty ones fill it up."""
    if packing.scope == "batch":
        return []
    copies = data_parallel_size(parallelism, world_size)
    total, micro = training.global_batch_size, training.micro_batch_size
    if copies == 0 or total % micro or total % (micro * copies) == 0:
        return []
    message = (
        f"{total} is not a multiple of training.micro_batch_size {micro} x data-parallel size "
        f"{copies} = {micro * copies} (world size {world_size}); use "
        f"{-(-total // (micro * copies)) * micro * copies}"
    )
    if total % copies == 0:
        message += f", or a micro_batch_size that divides {total // copies}"
    else:
        message += f", or a data-parallel size that divides {total}"
    return [Problem(("training", "global_batch_size"), message)]


def broken_world_rules(sections: Mapping[str, object], world_size: int) -> list[Problem]:
    """The problems of these rules, as far as their sections are there."""
    parallelism, training = sections.get("parallelism"), sections.get("training")
    if not isinstance(parallelism, ParallelismSection):
        return []
    problems = world_splits_into_copies(parallelism, world_size)
    if not problems:
        problems = experts_split_over_processes(parallelism, world_size)
    packing = sections.get("packing")
    if (
        not problems
        and isinstance(training, TrainingSection)
        and isinstance(packing, PackingSection)
    ):
        problems = global_batch_splits_over_copies(parallelism, training, packing, world_size)
    return problems


def check_world(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError if the recipe cannot run on this number of processes."""
    sections = {
        "parallelism": recipe.parallelism,
        "training": recipe.training,
        "packing": recipe.packing,
    }
    problems = broken_world_rules(sections, world_size)
    if problems:
        raise RecipeError(render(problems, Document(None)))
