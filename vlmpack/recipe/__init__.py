"""Recipes: one YAML file, checked before anything runs.

    recipe = load_recipe("recipes/digits-demo.yaml", ["training.max_steps=20"])
    check_world(recipe, world_size=2)
    sizes = derive(recipe, world_size=2)

Needs pydantic and PyYAML only.
"""

from vlmpack.recipe.derived import Derived, DerivedRow, derive, derived_rows
from vlmpack.recipe.identity import identity, identity_differences, identity_hint, identity_notes
from vlmpack.recipe.load import load_recipe
from vlmpack.recipe.notes import notes
from vlmpack.recipe.rules import check_world
from vlmpack.recipe.schema import Recipe
from vlmpack.recipe.show import dump_recipe, json_schema
from vlmpack.recipe.sources import Source

__all__ = [
    "Derived",
    "DerivedRow",
    "Recipe",
    "Source",
    "check_world",
    "derive",
    "derived_rows",
    "dump_recipe",
    "identity",
    "identity_differences",
    "identity_hint",
    "identity_notes",
    "json_schema",
    "load_recipe",
    "notes",
]
