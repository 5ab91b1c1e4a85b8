"""A recipe, and messages about its run, as strangers may read them.

Nothing of it says where something lies on this machine, or what an address hides: a place goes by
its last name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vlmpack.addresses import is_remote, redacted, scheme_of
from vlmpack.recipe.schema import Recipe
from vlmpack.recipe.show import dump_values

_BEGINS = r"(?:\bfile:/{0,2}|(?<![\w:/.~]))"
"""How a place begins inside a text: not behind a host, and not in the middle of a name."""
_BELOW = r"(?:[^/\s'\",\]}]+/)"
"""A folder in another, and no space in its name."""
_FOLDERS = re.compile(rf"{_BEGINS}~?/{_BELOW}+")
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
            recipe: resolved.
            run: the run's folder as it is named now, in messages too.
        """
        values = recipe.model_dump(mode="json")
        folders = {*_folders(values), *_folders(str(run))}
        return cls(dump_values(_public(values)), tuple(sorted(folders, key=len, reverse=True)))

    def without_places(self, text: str) -> str:
        """A message without the recipe's folders, and without others whose names have no spaces."""
        for folder in self.folders:
            text = re.sub(rf"{_BEGINS}{re.escape(folder)}/{_BELOW}*", "", text)
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
