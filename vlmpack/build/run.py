"""What a recipe says of a run beside its data, engine and objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmpack.build.extensions import Extensions
from vlmpack.evaluation.metrics import Metric
from vlmpack.recipe import Recipe, identity
from vlmpack.recipe.schema import (
    CheckpointSection,
    EvaluationSection,
    ExportSection,
    LoggingSection,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What happens around the steps of a run.

    Args:
        model: the model folder, as the recipe writes it.
        has_adapters: whether adapters are trained.
        checkpoint, evaluation, logging, export: the recipe's sections.
        identity: what makes it this run and no other.
        metrics: of answers, by the recipe's names for them.
        callbacks: of the program, called on the main rank.
        hooks: those of the callbacks that are called.
    """

    model: str
    has_adapters: bool
    checkpoint: CheckpointSection
    evaluation: EvaluationSection
    logging: LoggingSection
    export: ExportSection
    identity: Mapping[str, Any]
    metrics: Mapping[str, Metric]
    callbacks: tuple[object, ...]
    hooks: frozenset[str]


def run_spec(recipe: Recipe, extensions: Extensions) -> RunSpec:
    """What a recipe says of the run.

    Args:
        extensions: has metrics and callbacks of the program.
    """
    return RunSpec(
        model=recipe.model.path,
        has_adapters=bool(recipe.trainable.uses("lora")),
        checkpoint=recipe.checkpoint,
        evaluation=recipe.evaluation,
        logging=recipe.logging,
        export=recipe.export,
        identity=identity(recipe),
        metrics=extensions.metrics_of(recipe),
        callbacks=extensions.callbacks,
        hooks=extensions.hooks,
    )
