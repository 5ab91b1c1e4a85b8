"""What a recipe could say otherwise without changing what is learned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from vlmpack.errors import RecipeError
from vlmpack.recipe import Recipe, derive, load_recipe

Change = Mapping[str, Any]


def choices(recipe: Recipe, world_size: int) -> list[Change]:
    """Changes of one key each that leave every loss as it is, up to the rounding of sums: how a
    global batch is split into micro-batches, what is computed again, how many workers read, how
    ranks are balanced. Those that the recipe's rules refuse are left out.

    Args:
        world_size: processes that are measured.
    """
    return [change for change in _wanted(recipe, world_size) if _is_allowed(recipe, change)]


def words(change: Change) -> str:
    """`data.num_workers=2`, as the command line takes it; empty for the recipe as it is."""
    return " ".join(f"{name}={value}" for name, value in change.items())


def _wanted(recipe: Recipe, world_size: int) -> Iterator[Change]:
    training, packing = recipe.training, recipe.packing
    copies = derive(recipe, world_size).data_parallel
    if not packing.facts.plans_rows:
        micro, share = training.micro_batch_size, training.global_batch_size // copies
        sizes = {_below(micro, share), _above(micro, share)} - {micro}
        yield from ({"training.micro_batch_size": size} for size in sorted(sizes))
    own = recipe.model.activation_checkpointing
    for value in ("none", "selective", "full"):
        if value != own:
            yield {"model.activation_checkpointing": value}
    workers, cores = recipe.data.num_workers, len(os.sched_getaffinity(0)) // world_size
    numbers = {workers // 2, max(1, 2 * workers)} - {workers}
    yield from ({"data.num_workers": n} for n in sorted(numbers) if n <= max(1, cores))
    if packing.facts.plans_rows and copies > 1:
        yield {"packing.balance": "none" if packing.balance == "cost" else "cost"}


def _below(size: int, whole: int) -> int:
    """The largest divisor of `whole` up to half of `size`; `size` where there is none."""
    return max((n for n in range(1, size // 2 + 1) if whole % n == 0), default=size)


def _above(size: int, whole: int) -> int:
    """The smallest divisor of `whole` from twice `size` on; `size` where there is none."""
    return min((n for n in range(2 * size, whole + 1) if whole % n == 0), default=size)


def _is_allowed(recipe: Recipe, change: Change) -> bool:
    try:
        load_recipe(recipe, change)
    except RecipeError:
        return False
    return True
