"""Rules about adapters that training goes on with. `rules.py` says what a rule is.

They read adapter_config.json alone. A folder without one breaks none of them: whoever loads the
adapters says so.
"""

from __future__ import annotations

import os
from pathlib import Path

from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.errors import ModelError
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection
from vlmpack.recipe.trainable import TrainableSection

_WHERE = ("model", "adapter")


def read_adapter_config(
    model: ModelSection, base_dir: str | os.PathLike[str] | None = None
) -> AdapterConfig | None:
    """That of `model.adapter`; None where there is none or it cannot be read.

    Args:
        model: the recipe's section.
        base_dir: folder that a relative `model.adapter` starts at. None: the current directory.
    """
    if model.adapter is None:
        return None
    try:
        return AdapterConfig.read(Path(base_dir or "", model.adapter))
    except ModelError:
        return None


def adapters_have_components(
    adapter: AdapterConfig, model: ModelSection, trainable: TrainableSection
) -> list[Problem]:
    """What training goes on with is trained."""
    if trainable.uses("lora") or adapter.refusal is not None:  # which has a problem of its own
        return []
    message = (
        f"{model.adapter}, but no component has mode lora; set trainable.language: lora to go on "
        "with these adapters, or merge them first: vlmpack merge"
    )
    return [Problem(_WHERE, message)]


def adapters_are_as_the_recipe_says(
    adapter: AdapterConfig, model: ModelSection, trainable: TrainableSection
) -> list[Problem]:
    """`trainable.lora` says what the adapters of the folder are."""
    why = adapter.refusal
    if why is None and (what := adapter.unknown_here):
        why = f"it has {what}, which a recipe cannot say; merge them first: vlmpack merge"
    if why is not None:
        return [Problem(_WHERE, f"{model.adapter}: {why}")]
    if not trainable.uses("lora"):
        return []
    return [
        Problem(
            ("trainable", "lora", field),
            f"{getattr(trainable.lora, field)}, but model.adapter {model.adapter} has {found}; "
            f"use {str(found).lower()} to go on with it",
        )
        for field, found in adapter.settings()
        if getattr(trainable.lora, field) != found
    ]


def adapters_begin_without_effect(
    model: ModelSection, objective: ObjectiveSection
) -> list[Problem]:
    """With its adapters off a model is the one that the run began with only if they began so."""
    if model.adapter is None or objective.reference != "adapters_off":
        return []
    message = (
        f"'adapters_off', but the run begins with the adapters of {model.adapter}, so without them "
        "the model is not the one that it began with; use reference: cached"
    )
    return [Problem(("objective", "reference"), message)]
