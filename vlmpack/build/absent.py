"""Data that a recipe names and this disk has not, found without opening any."""

from __future__ import annotations

from vlmpack.addresses import is_remote, unset_references
from vlmpack.errors import RecipeError
from vlmpack.recipe import Recipe
from vlmpack.storage.sources import expand_shards


def absent_sources(recipe: Recipe) -> list[str]:
    """A line for each, in the words of the launch that it would stop; stores are not asked.

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
    return absent
