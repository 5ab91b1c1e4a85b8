"""A recipe as text: resolved YAML that loads back to the same recipe, and the JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from vlmpack.recipe.schema import Recipe
from vlmpack.recipe.yaml_nodes import FLOAT, INTEGER

_HEADER = "# Resolved recipe: every key, defaults included. It runs as it is.\n"


class _RecipeDumper(yaml.SafeDumper):
    """Quotes each string that our reader, or a YAML 1.1 reader, would take for something else."""


def _represent_list(dumper: _RecipeDumper, items: list[Any]) -> yaml.Node:
    """Short lists of scalars on one line."""
    scalars = not any(isinstance(item, (dict, list)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=scalars)


_RecipeDumper.add_representer(list, _represent_list)
for _tag, _pattern in (("float", FLOAT), ("int", INTEGER)):
    _RecipeDumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        _pattern,
        list("-+.0123456789"),
    )


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe as YAML; `load_recipe` on it gives an equal recipe."""
    return dump_values(recipe.model_dump(mode="json"))


def dump_values(values: Mapping[str, Any]) -> str:
    """The values of a complete recipe as YAML.

    Args:
        values: JSON, section by section.
    """
    body = yaml.dump(
        values,
        Dumper=_RecipeDumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=100,
    )
    return _HEADER + str(body)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors: types, bounds, allowed values, meanings."""
    schema = Recipe.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
