"""`vlmpack pack`: a recipe's training split, opened in its mode, into a folder. Mode `offline` is
packed as `online`."""

from __future__ import annotations

from pathlib import Path

from vlmpack.build.look import open_recipe
from vlmpack.build.run import date_of, date_of_unfinished, with_date
from vlmpack.data.packs.manifest import Manifest
from vlmpack.data.packs.write import PackOrder, PackSource, make_packs
from vlmpack.errors import RecipeError
from vlmpack.recipe import Recipe, load_recipe


def pack_recipe(recipe: Recipe, folder: Path, order: PackOrder) -> Manifest:
    """Packs what a recipe trains on, once.

    Args:
        recipe: in a mode that plans rows; `offline` packs like `online`.

    Raises:
        RecipeError: a recipe without planned rows, or one that cannot train on saved ones.
        PacksError: the folder cannot be used.
        ModelError, DataError, EmptyDataError: what is wrong with model folder or data.
    """
    if not recipe.packing.facts.plans_rows:
        setting, counts = (
            "packing.mode: online and training.micro_batch_size: 1",
            "then counts rows",
        )
        if recipe.objective.learns_pairs:
            setting = "packing.mode: online, packing.scope: batch and training.micro_batch_size: 1"
            counts = "goes on counting pairs"
        raise RecipeError(
            f"packing.mode: {recipe.packing.mode} plans no rows that could be saved. Set "
            f"{setting}, in the recipe or behind the command. training.global_batch_size "
            f"{counts}"
        )
    load_recipe(recipe, {"packing.mode": "offline", "packing.path": str(folder)})  # it will train
    if recipe.packing.facts.reads_packs:
        recipe = load_recipe(recipe, {"packing.mode": "online"})
    recipe = with_date(recipe, recipe.data.date or date_of_unfinished(folder) or date_of(recipe))
    train, _ = open_recipe(recipe, order.on_index)
    try:
        return make_packs(PackSource(train.config, train.split, train.dataset), folder, order)
    finally:
        train.split.close()
