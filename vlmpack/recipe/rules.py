"""Rules across keys and sections: one pure function per rule.

A rule names what it needs as its parameters. It returns the problems it found, with both numbers
and the knob to turn. A parameter is a top-level key of the recipe, or one of these:

- `config`: config.json of the model folder
- `adapter`: adapter_config.json of `model.adapter`, if the recipe has one; None if not readable
- `served`: the model's line of the capability table
- `world_size`: the number of processes
- `sections`: all keys there are

A rule is left out while something that it needs is unknown or has problems of its own.

Every public function of the `*_rules.py` modules that returns problems is a rule. A new rule needs
no registration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from inspect import isfunction, signature
from types import ModuleType

from vlmpack.capabilities.refused import refusal
from vlmpack.capabilities.served import SERVED, generic_line
from vlmpack.errors import RecipeError
from vlmpack.recipe import (
    capability_rules,
    data_rules,
    engine_rules,
    objective_rules,
    packing_rules,
    run_rules,
    trainable_rules,
)
from vlmpack.recipe.engine_rules import read_model_config
from vlmpack.recipe.problems import Document, Problem, render
from vlmpack.recipe.schema import ModelSection, Recipe
from vlmpack.recipe.trainable_rules import read_adapter_config

Rule = Callable[..., list[Problem]]

_MODULES = (
    run_rules,
    objective_rules,
    packing_rules,
    engine_rules,
    data_rules,
    trainable_rules,
    capability_rules,
)


def _rules_of(module: ModuleType) -> Iterator[Rule]:
    """Its public functions that return problems, in the order that they stand in."""
    for name, value in vars(module).items():
        is_own = isfunction(value) and value.__module__ == module.__name__
        is_public = is_own and not name.startswith("_")
        if is_public and signature(value).return_annotation == "list[Problem]":
            yield value


RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in _rules_of(module))
_NEEDS = {rule: signature(rule).parameters.keys() for rule in RULES}


def broken_rules(
    sections: Mapping[str, object],
    base_dir: str | os.PathLike[str] | None = None,
    world_size: int | None = None,
) -> list[Problem]:
    """The problems of every rule whose arguments are all there.

    Args:
        sections: the top-level keys of a recipe whose own types are right.
        base_dir: folder that a relative `model.path` starts at. None: the current directory.
        world_size: processes of the run; None where nobody knows yet.
    """
    known: dict[str, object] = {**sections, "sections": sections}
    model = sections.get("model")
    config = read_model_config(model, base_dir) if isinstance(model, ModelSection) else None
    if config is not None:
        known["config"] = config
        model_type = config.content.get("model_type")
        if isinstance(model_type, str) and model_type in SERVED:
            known["served"] = SERVED[model_type]
        elif isinstance(model_type, str) and refusal(config.content) is None:
            known["served"] = generic_line(model_type)
    if isinstance(model, ModelSection) and model.adapter is not None:
        known["adapter"] = read_adapter_config(model.adapter, base_dir)
    if world_size is not None:
        known["world_size"] = world_size
    return [
        problem
        for rule, needs in _NEEDS.items()
        if needs <= known.keys()
        for problem in rule(**{name: known[name] for name in needs})
    ]


def check_world(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError if the recipe cannot run on this number of processes."""
    names = ("parallelism", "training", "packing")
    sections = {name: getattr(recipe, name) for name in names}
    if problems := broken_rules(sections, world_size=world_size):
        raise RecipeError(render(problems, Document(None)))
