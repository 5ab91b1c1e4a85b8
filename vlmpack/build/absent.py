"""What a recipe reads and this disk has not, found without opening any."""

from __future__ import annotations

from pathlib import Path

from vlmpack.addresses import is_remote, unset_references
from vlmpack.errors import RecipeError
from vlmpack.recipe import Recipe
from vlmpack.recipe.data_rules import read_folders
from vlmpack.storage.sources import expand_shards
from vlmpack.words import meant_path


def absent_places(recipe: Recipe) -> list[str]:
    """A line for each place that is not there, with one of a like name beside it; stores are not
    asked.

    No error: a recipe may be checked on another machine than it runs on.
    """
    absent: list[str] = []
    for split, sources in recipe.data.splits().items():
        paths = [source.path for source in sources]
        here = [path for path in paths if not is_remote(path) and not unset_references(path)]
        try:
            if here:
                expand_shards(here, key=f"data.{split}")
        except RecipeError as error:
            absent += error.problems
    for key, path in read_folders(recipe):
        if path is not None and not is_remote(path) and not Path(path).is_dir():
            absent.append(f"{key}: {path!r} is no folder (from {Path.cwd()}){meant_path(path)}")
    return absent
