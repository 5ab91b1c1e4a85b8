"""Rules about places: a recipe names local files and folders, never a program or an address.

Paths are taken as written. Relative ones start at the current directory, so that a resolved
recipe runs again from the directory it was first run in. Nothing in them is expanded, neither
`~` nor `${...}`; what looks like it is refused, since a folder of that name is never meant.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vlmpack.recipe.problems import KeyPath, Problem
from vlmpack.recipe.schema import DataSection, ModelSection, Recipe
from vlmpack.recipe.sources import Source

_REMOTE = ("s3", "gs", "az", "http", "https", "hf")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://|(pipe|exec|sh|cmd|file):", re.IGNORECASE)
_SPLITS = ("train", "validation", "test")


def model_is_local(model: ModelSection) -> list[Problem]:
    """The model is a folder on this machine."""
    return _not_local(("model", "path"), model.path)


def sources_are_local(data: DataSection) -> list[Problem]:
    """Shards are files on this machine."""
    return [
        problem
        for split, sources in zip(_SPLITS, (data.train, data.validation, data.test), strict=True)
        for index, source in enumerate(sources or ())
        for problem in _not_local(("data", split, index, "path"), source.path)
    ]


def index_dir_is_local(data: DataSection) -> list[Problem]:
    """The shard index is kept on this machine."""
    return _not_local(("data", "index_dir"), data.index_dir or "")


def run_dir_is_local(run_dir: str) -> list[Problem]:
    """A run writes to this machine."""
    return _not_local(("run_dir",), run_dir)


def _not_local(key: KeyPath, path: str) -> list[Problem]:
    """What keeps `path` from being a local one. Only its scheme is quoted: an address may hold a
    password."""
    if path.startswith("~"):
        return [Problem(key, "'~' is not expanded in paths; write the folder out")]
    if "${" in path or "$(" in path:
        return [Problem(key, "'$' references are not expanded in paths; write the folder out")]
    if not (match := _SCHEME.match(path)):
        return []
    scheme = (match[1] or match[2]).lower()
    if scheme in _REMOTE:
        message = f"'{scheme}://' addresses are not in this version; copy the files to a local path"
    elif scheme == "file":
        message = "'file:' is not needed; write the path alone"
    else:
        message = f"'{scheme}:' is not allowed; a recipe names files, never a program"
    return [Problem(key, message)]


def anchored(recipe: Recipe, base_dir: str | os.PathLike[str]) -> Recipe:
    """The recipe with its relative paths joined to `base_dir`."""

    def join(path: str) -> str:
        return str(Path(base_dir) / path)

    def moved(sources: tuple[Source, ...] | None) -> tuple[Source, ...] | None:
        return sources and tuple(
            source.model_copy(update={"path": join(source.path)}) for source in sources
        )

    model, data = recipe.model, recipe.data
    places = {
        "train": moved(data.train),
        "validation": moved(data.validation),
        "test": moved(data.test),
        "index_dir": None if data.index_dir is None else join(data.index_dir),
    }
    return recipe.model_copy(
        update={
            "model": model.model_copy(update={"path": join(model.path)}),
            "data": data.model_copy(update=places),
            "run_dir": join(recipe.run_dir),
        }
    )
