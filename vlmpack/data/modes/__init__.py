"""How samples come to share rows. A packing mode is a value: whatever depends on it asks it.

    cut        a window's order -> its global batches and their bins; how large a window is
    identity   what of the cut decides the order, so that a run does not go on with another
    collator   what makes one batch of a bin's samples
    shape      the slots that such a batch takes, for those who encode no sample (`vlmpack plan`)
    label      what tables call it

A mode holds the recipe's `packing` section, the budget of a row that follows from it, and the
multiples that the parallel layout asks for. `base.py` has the class, `in_batch.py` and `online.py`
the modes. What the recipe's rules must know of a mode stands in vlmpack/recipe/packing_modes.py:
its name, whether rows are planned by a budget, the fields that a run may not change.

A new mode is a line there, a module here with a subclass of PackingMode, and a line in MODES. It
writes `cut` (and a packer, where neither of vlmpack/data/plan/packers.py does), and overrides the
other methods where its rows are not one a bin, of any width, as those of `in_batch` are.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmpack.data.modes.base import Cutting, PackingMode, RowShape, Uncut
from vlmpack.data.modes.in_batch import InBatch, Padded
from vlmpack.data.modes.online import Offline, Online
from vlmpack.data.plan.state import DataState
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe import Recipe
from vlmpack.recipe.derived import graph_sequences, multiples, row_bounds
from vlmpack.recipe.packing_modes import ModeName
from vlmpack.recipe.schema import PackingSection

__all__ = [
    "MODES",
    "Cutting",
    "InBatch",
    "Offline",
    "Online",
    "Padded",
    "PackingMode",
    "RowShape",
    "Uncut",
    "evaluation_mode",
    "keep_alignment",
    "packing_mode",
]

MODES: Mapping[ModeName, type[PackingMode]] = {
    "none": Padded,
    "in_batch": InBatch,
    "online": Online,
    "offline": Offline,
}


def packing_mode(recipe: Recipe, begun: DataState | None = None) -> PackingMode:
    """The recipe's mode, for its training split.

    Args:
        begun: a state of the run that goes on; None for one that begins.
    """
    recipe = keep_alignment(recipe, begun)
    packing, parallelism = recipe.packing, recipe.parallelism
    return MODES[packing.mode](
        packing=packing,
        budget=RowBudget(
            **row_bounds(packing, recipe.training, parallelism, pairs=recipe.objective.learns_pairs)
        ),
        multiples=multiples(parallelism),
        captures=recipe.training.cuda_graphs != "none",
        graph_sequences=graph_sequences(recipe.training),
    )


def evaluation_mode(recipe: Recipe) -> PackingMode:
    """The mode of the splits that are not trained on: they are read in order, bin by bin."""
    mode: ModeName = "none" if recipe.packing.facts.pads else "in_batch"
    section = PackingSection(mode=mode, share_prefix=recipe.packing.share_prefix)
    training = recipe.training.model_copy(update={"cuda_graphs": "none"})
    return packing_mode(recipe.model_copy(update={"packing": section, "training": training}))


def keep_alignment(recipe: Recipe, begun: DataState | None) -> Recipe:
    """The recipe with the alignment that a run began with, where its packer would keep it.

    Where the recipe leaves `packing.alignment` open, a run keeps the one it began with as long as
    context parallelism can cut it: its global batches stay the same. Packs bring their own.

    Args:
        begun: a state of the run; None for a run that has not begun.
    """
    packing = recipe.packing
    alignment = None if begun is None else begun.identity.get("packing.alignment")
    cuts_rows = packing.facts.plans_rows and not packing.facts.reads_packs
    if not cuts_rows or packing.alignment is not None or not isinstance(alignment, int):
        return recipe
    if alignment % multiples(recipe.parallelism).sequence:
        return recipe
    return recipe.model_copy(
        update={"packing": packing.model_copy(update={"alignment": alignment})}
    )
