"""A recipe's objective: the value that a stepper is made from, and the stepper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlmpack.backends.engine import Engine
from vlmpack.build.extensions import NO_EXTENSIONS, Extensions
from vlmpack.distributed import Ranks
from vlmpack.recipe import Recipe
from vlmpack.recipe.derived import multiples
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.trainable import OptimSection
from vlmpack.training.objective import Objective, objective_of
from vlmpack.training.reference import without_adapters
from vlmpack.training.run_dir import RunDir
from vlmpack.training.sentinel import Sentinel
from vlmpack.training.step import Schedule, Stepper, TrainabilityCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """The minimised objective, and its settings.

    Args:
        seed: of what layers draw, in adapters and models that do.
        sentinel: makes the sentinel of an engine; None for none.
    """

    section: ObjectiveSection
    own: Objective | None
    sources: tuple[str, ...]
    optim: OptimSection
    seed: int
    reference_folder: Path
    sentinel: Callable[..., Sentinel] | None = None


def objective_spec(recipe: Recipe, extensions: Extensions = NO_EXTENSIONS) -> ObjectiveSpec:
    folder, training = recipe.objective.reference_dir, recipe.training
    sentinel = None
    if training.sentinel_interval is not None:
        sentinel = partial(
            Sentinel,
            interval=training.sentinel_interval,
            on_difference=training.on_sentinel,
            seed=training.seed,
            multiples=multiples(recipe.parallelism),
        )
    return ObjectiveSpec(
        section=recipe.objective,
        own=extensions.objective,
        sources=recipe.data.source_names,
        optim=recipe.optim,
        seed=training.seed,
        reference_folder=RunDir(Path(recipe.run_dir)).reference if folder is None else Path(folder),
        sentinel=sentinel,
    )


def build_stepper(
    spec: ObjectiveSpec, engine: Engine, ranks: Ranks, *, total_steps: int
) -> Stepper:
    section = spec.section
    in_step = section.has_reference and not section.keeps_reference
    return Stepper(
        engine=engine,
        objective=objective_of(section, spec.sources, spec.own),
        schedule=Schedule(spec.optim, total_steps),
        max_grad_norm=spec.optim.max_grad_norm,
        ranks=ranks,
        check=TrainabilityCheck(engine, ranks),
        dropout_seed=spec.seed if engine.draws else None,
        reference=without_adapters if in_step else None,
        sentinel=None if spec.sentinel is None else spec.sentinel(engine=engine),
    )
