"""Recipe -> what a planned row holds: its budget, its fixed shape, or the packs it comes from."""

from __future__ import annotations

from pathlib import Path

from vlmpack.data.config import PacksConfig
from vlmpack.data.plan.packers import RowBudget
from vlmpack.data.plan.state import DataState
from vlmpack.packing import FixedShape, round_up
from vlmpack.recipe import Recipe
from vlmpack.recipe.derived import multiples, plan_alignment, row_tokens


def row_budget(recipe: Recipe, resume: DataState | None) -> RowBudget:
    """What a planned row holds.

    Where the recipe leaves `packing.alignment` open, a run keeps the one it began with as long as
    context parallelism can cut it: its global batches stay the same.
    """
    packing, parallelism = recipe.packing, recipe.parallelism
    alignment = plan_alignment(packing, parallelism)
    begun = None if resume is None else resume.identity.get("packing.alignment")
    if packing.alignment is None and isinstance(begun, int):
        is_whole = begun % multiples(parallelism).sequence == 0
        alignment = begun if is_whole else alignment
    return RowBudget(
        max_tokens=round_up(recipe.training.seq_length, alignment)
        if packing.max_tokens is None
        else packing.max_tokens,
        max_patches=packing.max_vision_patches,
        max_sequences=None if packing.max_sequences == "auto" else packing.max_sequences,
        alignment=alignment,
    )


def fixed_shape(recipe: Recipe) -> FixedShape | None:
    """The shape of all planned rows, where the recipe fixes it."""
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
        max_tokens=row_tokens(packing, recipe.training, recipe.parallelism),
        max_patches=packing.max_vision_patches,
        max_sequences=None if packing.max_sequences == "auto" else packing.max_sequences,
        alignment=packing.alignment,
        sequence_multiple=multiples(recipe.parallelism).sequence,
    )
