"""Rules across keys and sections: one pure function per rule.

A rule names what it needs as its parameters and returns the problems it found, with both numbers
and the knob to turn. A parameter is a top-level key of the recipe, or `config` (the model folder's
config.json), `adapter` (adapter_config.json of `model.adapter`), `served` (the model's line of the
capability table), `world_size`, `sections` (all keys there are). A rule is left out while something
that it needs is unknown or has problems of its own.

Every public function of the modules below that returns problems is a rule: to write it is all that
a new one takes. The rules about sources and images are in `data_rules.py`, about rows in
`packing_rules.py`, about what rows share in `sharing_rules.py`, places on disk in `path_rules.py`,
about the engines in `engine_rules.py`, about captured decoders in `graph_rules.py`, about the
model's own sizes in `model_rules.py`, what its family can do in `capability_rules.py`, about what
is trained in `trainable_rules.py`, adapters that are gone on with in `adapter_rules.py`, what is
minimised in `objective_rules.py`, about the length of a run, its batches and what is shown of it in
`run_rules.py`, about the number of processes in `world_rules.py`.
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
    adapter_rules,
    capability_rules,
    data_rules,
    engine_rules,
    graph_rules,
    model_rules,
    objective_rules,
    packing_rules,
    path_rules,
    run_rules,
    sharing_rules,
    trainable_rules,
    world_rules,
)
from vlmpack.recipe.adapter_rules import read_adapter_config
from vlmpack.recipe.model_rules import read_model_config
from vlmpack.recipe.problems import Document, Problem, render
from vlmpack.recipe.schema import ModelSection, Recipe

Rule = Callable[..., list[Problem]]

_MODULES = (
    run_rules,
    objective_rules,
    packing_rules,
    sharing_rules,
    engine_rules,
    graph_rules,
    data_rules,
    trainable_rules,
    adapter_rules,
    path_rules,
    model_rules,
    capability_rules,
    world_rules,
)


def _rules_of(module: ModuleType) -> Iterator[Rule]:
    """Its public functions that return problems, in the order that they stand in."""
    for name, value in vars(module).items():
        is_own = isfunction(value) and value.__module__ == module.__name__
        is_public = is_own and not name.startswith("_")
        if is_public and signature(value).return_annotation == "list[Problem]":
            yield value


RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in _rules_of(module))


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
    if isinstance(model, ModelSection) and (adapter := read_adapter_config(model, base_dir)):
        known["adapter"] = adapter
    if world_size is not None:
        known["world_size"] = world_size
    return [
        problem
        for rule, needs in ((rule, signature(rule).parameters) for rule in RULES)
        if needs.keys() <= known.keys()
        for problem in rule(**{name: known[name] for name in needs})
    ]


def check_world(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError if the recipe cannot run on this number of processes."""
    names = ("parallelism", "training", "packing")
    sections = {name: getattr(recipe, name) for name in names}
    if problems := broken_rules(sections, world_size=world_size):
        raise RecipeError(render(problems, Document(None)))
