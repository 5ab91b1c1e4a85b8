"""Whether the run that lies in a recipe's folder could go on in the recipe's layout."""

from __future__ import annotations

from pathlib import Path

from vlmpack.build.data import keep_alignment
from vlmpack.data.plan.eras import alignment_words
from vlmpack.data.plan.state import DataState
from vlmpack.errors import CheckpointError
from vlmpack.recipe import Recipe
from vlmpack.recipe.derived import plan_alignment
from vlmpack.training.checkpoint.folders import saved_data_state
from vlmpack.training.run_dir import RunDir


def begun_note(recipe: Recipe) -> str | None:
    """What a launch would refuse: the run in `run_dir` was planned with an alignment that the
    recipe's layout cannot cut. None where there is no such run, or it can go on.

    Args:
        recipe: whose rows may be planned and whose `run_dir` may hold checkpoints.
    """
    packing, checkpoint = recipe.packing, recipe.checkpoint
    cuts_rows = packing.facts.plans_rows and not packing.facts.reads_packs
    refuses = checkpoint.on_data_change == "refuse" and checkpoint.resume != "never"
    if not cuts_rows or not refuses:
        return None
    text = saved_data_state(RunDir(Path(recipe.run_dir)).checkpoints)
    try:
        begun = None if text is None else DataState.from_json(text)
    except CheckpointError:  # a launch says so
        return None
    planned = None if begun is None else begun.identity.get("packing.alignment")
    wanted = plan_alignment(keep_alignment(recipe, begun).packing, recipe.parallelism)
    if not isinstance(planned, int) or planned == wanted:
        return None
    return (
        f"run_dir: {recipe.run_dir} holds a run that a launch here would not go on with; "
        f"{alignment_words(planned, wanted)}"
    )
