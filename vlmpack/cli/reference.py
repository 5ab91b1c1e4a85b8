"""`vlmpack reference`: the reference model's log-probabilities, before a run or beside it."""

from __future__ import annotations

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import Overrides, RecipeOrRun, launcher_number, load
from vlmpack.terminal import say


def reference(recipe: RecipeOrRun, overrides: Overrides = None) -> None:
    """Compute what the model of a preference recipe says of its pairs, and keep it.

    Two numbers a pair, in `objective.reference_dir`. A run does the same at its launch; a pass that
    was stopped goes on where it was. Runs under torchrun too.
    """
    loaded = load(recipe, overrides, launcher_number("WORLD_SIZE", 1))
    from transformers.utils import logging as transformers_logging

    from vlmpack.run.place import watched_ranks
    from vlmpack.run.reference import make_references

    transformers_logging.disable_progress_bar()
    with watched_ranks(loaded) as ranks:
        ACTIVITY.enter_alone("opening model and data")
        passes = make_references(loaded, ranks)
        if ranks.is_main:
            for found in passes:
                say(
                    f"{found.split}: {found.num_pairs} pairs, {found.num_computed} of them "
                    f"computed now, in {found.folder}"
                )
