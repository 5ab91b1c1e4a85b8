"""Inputs and figures of a plan, for tests of what follows from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from vlmpack.build.data import packing_mode
from vlmpack.build.engine import engine_spec
from vlmpack.data.config import DataConfig
from vlmpack.distributed import Ranks
from vlmpack.forecast.figures import ModeFigures
from vlmpack.forecast.make import PlanInputs
from vlmpack.recipe import Recipe


def plan_inputs(recipe: Recipe, **values: Any) -> PlanInputs:
    """What a plan of a recipe is made of, on one process and of no known sizes; `values` in place
    of some."""
    given: dict[str, Any] = {
        "engine": engine_spec(recipe, encoder=cast(Any, None), ranks=Ranks()),
        "objective": recipe.objective,
        "packing": recipe.packing,
        "config": DataConfig(data=recipe.data, training=recipe.training, mode=packing_mode(recipe)),
        "split": None,
        "sizes": None,
        "world_size": 1,
        "answers": recipe.evaluation.generate,
    }
    made = PlanInputs(**{**given, **values})
    length = recipe.training.max_steps, recipe.training.num_epochs
    training = made.config.training.model_copy(
        update=dict(zip(("max_steps", "num_epochs"), length, strict=True))
    )
    return replace(made, config=replace(made.config, training=training))


def mode_of(**values: Any) -> ModeFigures:
    """Figures of a small plan; `values` in place of some."""
    given = {
        "name": "in_batch", "is_recipes": True, "is_estimated": False, "micro_batch_size": 16,
        "steps": 10, "counts_rows": False, "samples": 160, "rows": 10, "tokens": 9000,
        "held_tokens": 9000, "slots": 9000, "empty_rows": 0, "row_tokens": 0,
        "vision_patches": 100, "compute": 1.0,
        "max_row_slots": 1000, "max_row_patches": 500, "mean_batch_samples": 16.0,
        "mean_batch_tokens": 900.0,
    }  # fmt: skip
    return ModeFigures(**{**given, **values})
