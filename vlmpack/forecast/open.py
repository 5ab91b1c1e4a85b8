"""A recipe's training split, opened as a run opens it, and planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vlmpack.build.data import build_cost_model, build_encoder, data_spec, open_split
from vlmpack.build.engine import engine_spec
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.packs.manifest import MANIFEST
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError
from vlmpack.forecast.communication import Links
from vlmpack.forecast.figures import Progress, RunPlan, silent
from vlmpack.forecast.longest import shared_layouts
from vlmpack.forecast.make import PlanInputs, plan_figures
from vlmpack.forecast.parameters import UnknownSizesError, built_sizes, read_sizes
from vlmpack.forecast.trained import EVERY_WEIGHT, trained_sizes
from vlmpack.recipe import Recipe, check_world, load_recipe


def plan_recipe(
    recipe: Recipe,
    *,
    world_size: int,
    progress: Progress = silent,
    links: Links | None = None,
    full_rows: bool = False,
) -> RunPlan:
    """The plan of a run of the recipe. No model is loaded, no GPU is used.

    What is not indexed yet is indexed first.

    Args:
        full_rows: whether memory and what ranks send are those of full rows.

    Raises:
        RecipeError: the recipe cannot run on so many processes, or plans no rows that could be
            full.
        ModelError, CapabilityError: the model folder.
        DataError, EmptyDataError: the data.
    """
    check_world(recipe, world_size)
    if full_rows and not recipe.packing.facts.plans_rows:
        raise RecipeError(
            f"--full-rows: packing.mode is {recipe.packing.mode}, whose rows have no budget to "
            "fill; expected online or offline"
        )
    encoder = build_encoder(recipe)
    engine = engine_spec(recipe, encoder, Ranks())
    unsized = ""
    try:
        sizes = read_sizes(encoder.folder)
        if sizes is None:
            sizes = built_sizes(encoder.family.auto_class(), encoder.folder)
    except UnknownSizesError as error:  # all but memory can be said
        sizes, unsized = None, str(error)
    trained = EVERY_WEIGHT if sizes is None else trained_sizes(engine.policy, encoder)
    read, packs = recipe, recipe.packing.path
    if recipe.packing.facts.reads_packs and not (packs and (Path(packs) / MANIFEST).is_file()):
        read = load_recipe(recipe, {"packing.mode": "online"})
    data = data_spec(read, encoder, engine.ranks)
    train = open_split(data, "data.train", Ledger(None), progress=progress)
    assert train is not None  # data.train is required
    try:
        train.split.index_all()
        inputs = PlanInputs(
            engine=engine,
            objective=recipe.objective,
            packing=recipe.packing,
            answers=recipe.evaluation.generate,
            copies_saves=recipe.checkpoint.asynchronous,
            config=replace(train.config, row_cost=build_cost_model(encoder)),
            split=train.split,
            sizes=sizes,
            unsized=unsized,
            trained=trained,
            world_size=world_size,
            links=links or Links(),
            full_rows=full_rows,
            layouts=tuple(shared_layouts(recipe, world_size)),
        )
        return plan_figures(inputs, progress)
    finally:
        train.split.close()
