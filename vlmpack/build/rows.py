"""Recipe -> what a planned row holds: its budget, its fixed shape, or the packs it comes from."""

from __future__ import annotations

from pathlib import Path

from vlmpack.data.config import PacksConfig
from vlmpack.data.plan.state import DataState
from vlmpack.packing import FixedShape
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe import Recipe
from vlmpack.recipe.derived import multiples, plan_alignment, row_tokens


def keep_alignment(recipe: Recipe, begun: DataState | None) -> Recipe:
    """The recipe with the alignment that a run began with, where its packer would keep it.

    Where the recipe leaves `packing.alignment` open, a run keeps the one it began with as long as
    context parallelism can cut it: its global batches stay the same. Packs bring their own.

    Args:
        begun: a state of the run; None for a run that has not begun.
    """
    packing = recipe.packing
    alignment = None if begun is None else begun.identity.get("packing.alignment")
    if packing.mode != "online" or packing.alignment is not None or not isinstance(alignment, int):
        return recipe
    if alignment % multiples(recipe.parallelism).sequence:
        return recipe
    return recipe.model_copy(
        update={"packing": packing.model_copy(update={"alignment": alignment})}
    )


def row_budget(recipe: Recipe, resume: DataState | None) -> RowBudget:
    """What a planned row holds, in a run that begins or that goes on (`keep_alignment`)."""
    recipe = keep_alignment(recipe, resume)
    packing, parallelism = recipe.packing, recipe.parallelism
    return RowBudget(
        max_tokens=row_tokens(packing, recipe.training, parallelism),
        max_patches=packing.max_vision_patches,
        max_sequences=None if packing.max_sequences == "auto" else packing.max_sequences,
        alignment=plan_alignment(packing, parallelism),
    )


def fixed_shape(recipe: Recipe) -> FixedShape | None:
    """The shape of all planned rows, where the recipe fixes it. Its width is that of a run that
    begins now: the packer's own budget replaces it (`PackCollator.settled`)."""
    packing = recipe.packing
    if not packing.pad_to_max_length:
        return None
    return FixedShape(
        row_tokens=row_tokens(packing, recipe.training, recipe.parallelism),
        max_sequences=packing.max_sequences if packing.pad_cu_seqlens else None,
    )


def packs_config(recipe: Recipe) -> PacksConfig:
    """What the recipe says of packs that were made before."""
    packing = recipe.packing
    assert packing.path is not None  # the recipe's rules see to it
    return PacksConfig(
        path=Path(packing.path),
        max_tokens=packing.max_tokens,
        max_patches=packing.max_vision_patches,
        max_sequences=None if packing.max_sequences == "auto" else packing.max_sequences,
        alignment=packing.alignment,
        sequence_multiple=multiples(recipe.parallelism).sequence,
    )
