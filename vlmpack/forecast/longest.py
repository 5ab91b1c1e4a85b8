"""The longest row that a GPU has room for, by how many GPUs share it. Nothing is planned anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, lcm

from vlmpack.alignment import round_up
from vlmpack.errors import RecipeError
from vlmpack.forecast.figures import LargestMicroBatch, LongestRow, MemoryFigures, ModeFigures
from vlmpack.forecast.memory import SHARE, least_that_fits
from vlmpack.recipe import Recipe, check_world, load_recipe
from vlmpack.recipe.derived import multiples, plan_alignment, smallest_world
from vlmpack.recipe.schema import ModelSection, ParallelismSection, described

CONTEXTS = (1, 2, 4, 8)

MOST_TOKENS = 2**31
"""Boundaries of segments are int32."""


@dataclass(frozen=True, slots=True)
class Layout:
    """So many processes, and a number of tokens that rows are multiples of."""

    parallelism: ParallelismSection
    world_size: int
    step: int


Estimate = Callable[[ModelSection, Layout, LargestMicroBatch], MemoryFigures]


def shared_layouts(recipe: Recipe, world_size: int) -> Iterator[Layout]:
    """The recipe's layout, and those of other `CONTEXTS` that the recipe's rules allow, each on as
    many processes if these suffice."""
    own = recipe.parallelism.context
    for context in sorted({own, *CONTEXTS}):
        changes: dict[str, object] = {}
        if context != own:
            length = round_up(recipe.training.seq_length, 2 * context)
            changes = {
                "parallelism.context": context,
                "parallelism.context_heads": None,
                "packing.alignment": None,
                "packing.max_tokens": None,
                "training.seq_length": length,
            }
        try:
            changed = load_recipe(recipe, changes)
            processes = max(world_size, smallest_world(changed.parallelism))
            check_world(changed, processes)
        except RecipeError:
            continue
        split = changed.parallelism
        step = lcm(plan_alignment(changed.packing, split), multiples(split).row)
        yield Layout(split, processes, step)


def longest_row(
    model: ModelSection,
    layout: Layout,
    own: LargestMicroBatch | ModeFigures,
    room: int,
    estimate: Estimate,
    *,
    most_patches: Callable[[int], int],
) -> LongestRow:
    """The longest row whose estimate fits `SHARE` of the room, by bisection. Of 0 tokens where none
    does; its bytes are then those of the shortest.

    Args:
        model: its dtype resolved. Under `auto` the least recomputation that fits is taken.
        own: its patches for each token are those of the row, as `most_patches` bounds them.
        room: bytes of a GPU.
    """

    def row_of(steps: int) -> LargestMicroBatch:
        tokens = steps * layout.step
        patches = ceil(tokens * own.max_row_patches / max(1, own.max_row_slots))
        return LargestMicroBatch(own.micro_batch_size, tokens, most_patches(patches))

    def held(steps: int) -> tuple[ModelSection, MemoryFigures]:
        row = row_of(steps)
        if not model.recomputes_what_fits:
            return model, estimate(model, layout, row)
        split = layout.parallelism
        return least_that_fits(model, split, lambda one: estimate(one, layout, row), room, "")

    def fits(steps: int) -> bool:
        return held(steps)[1].total <= SHARE * room

    fitting, over = 0, 1
    while fits(over) and over * layout.step < MOST_TOKENS:
        fitting, over = over, 2 * over
    while over - fitting > 1:
        middle = (fitting + over) // 2
        fitting, over = (middle, over) if fits(middle) else (fitting, middle)
    chosen, figures = held(max(1, fitting))
    return LongestRow(
        world_size=layout.world_size,
        context=layout.parallelism.context,
        tokens=fitting * layout.step,
        patches=figures.row_patches if fitting else 0,
        recomputed=described(chosen.recomputed),
        total=figures.total,
    )
