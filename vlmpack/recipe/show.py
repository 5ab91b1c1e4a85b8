"""A recipe as text: resolved YAML that loads back to the same recipe, and the JSON schema.

`PublicRecipe` is what strangers may read, of a recipe and of messages about its run. It does not
say where something lies on this machine, or what an address hides: a path keeps its last name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from vlmpack.addresses import is_remote, redacted, scheme_of
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
    """The values of a complete recipe as YAML."""
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


_STARTS = r"(?:\bfile:/{0,2}|(?<![\w:/.~]))"
"""The start of a place inside a text: not after a host, and not inside a name."""
_BELOW = r"(?:[^/\s'\",\]}]+/)"
"""A folder in another, and no space in its name."""
_FOLDERS = re.compile(rf"{_STARTS}~?/{_BELOW}+")
"""What stands before the last name of an absolute path whose folders have no spaces."""
_PATTERN = re.compile(r"[*?\[{]")


@dataclass(frozen=True, slots=True)
class PublicRecipe:
    """What may be shown of a recipe.

    Args:
        text: resolved YAML.
        folders: of this machine that it names, longest first.
    """

    text: str
    folders: tuple[str, ...]

    @classmethod
    def of(cls, recipe: Recipe, run: Path) -> PublicRecipe:
        """That of a recipe.

        Args:
            run: the run's folder as it is named now, in messages too.
        """
        values = recipe.model_dump(mode="json")
        folders = {*_folders(values), *_folders(str(run))}
        return cls(dump_values(_public(values)), tuple(sorted(folders, key=len, reverse=True)))

    def without_places(self, text: str) -> str:
        """A message without the recipe's folders, and without others whose names have no spaces."""
        for folder in self.folders:
            text = re.sub(rf"{_STARTS}{re.escape(folder)}/{_BELOW}*", "", text)
        return _FOLDERS.sub("", redacted(text))


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_public(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if is_remote(value):
        return redacted(value)
    if _is_place(value):
        return PurePosixPath(value).name or value
    return _FOLDERS.sub("", redacted(value))


def _is_place(text: str) -> bool:
    return PurePosixPath(text).is_absolute() or scheme_of(text) == "file"


def _folders(value: Any) -> Iterator[str]:
    """The folders of all absolute paths in a value, as far as no pattern stands in for names."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _folders(inner)
    elif isinstance(value, str) and PurePosixPath(value).is_absolute():
        folder = _PATTERN.split(value)[0].rpartition("/")[0]
        if folder:
            yield folder
