"""What a planned row holds follows from the recipe, and from the run that goes on."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpack.build.data import packing_mode
from vlmpack.data.plan.state import DataState, Era
from vlmpack.recipe import Recipe, load_recipe


def recipe(*, context: int = 1, **packing: Any) -> Recipe:
    return load_recipe(
        {
            "model": {"path": "m", "backend": "mcore"},
            "data": {"train": "t.tar"},
            "packing": {"mode": "online", **packing},
            "parallelism": {"context": context},
            "training": {
                "micro_batch_size": 1,
                "global_batch_size": 4,
                "seq_length": 1008,
                "max_steps": 2,
            },
            "optim": {"lr": 1e-4},
            "run_dir": "r",
        }
    )


def state_with(alignment: int) -> DataState:
    era = Era(0, {"packing.alignment": alignment})
    return DataState(0, 0, 3, 3, (0,), (era,))


@pytest.mark.parametrize(("context", "alignment"), [(1, 8), (2, 8), (4, 8), (8, 16), (3, 12)])
def test_the_alignment_is_a_multiple_of_twice_the_context_size_from_8_on(
    context: int, alignment: int
) -> None:
    assert packing_mode(recipe(context=context)).budget.alignment == alignment


@pytest.mark.parametrize(
    ("begun", "context", "alignment"),
    [
        (16, 1, 16),  # a run of CP 8 goes on at CP 1, 2 and 4 with the rows it had
        (16, 4, 16),
        (8, 8, 16),  # CP 8 cannot cut rows that were planned for 8
        (8, 4, 8),
    ],
)
def test_a_run_keeps_its_alignment_where_context_parallelism_can_cut_it(
    begun: int, context: int, alignment: int
) -> None:
    assert packing_mode(recipe(context=context), state_with(begun)).budget.alignment == alignment


def test_what_the_recipe_says_wins() -> None:
    budget = packing_mode(
        recipe(alignment=32, max_tokens=4096, max_vision_patches=900, max_sequences=7),
        state_with(8),
    ).budget
    assert (budget.alignment, budget.max_tokens) == (32, 4096)
    assert (budget.max_patches, budget.max_sequences) == (900, 7)
    assert packing_mode(recipe()).budget.max_sequences is None, "settled by a dry run"


def test_a_row_holds_the_longest_sample_rounded_up() -> None:
    assert packing_mode(recipe(alignment=100)).budget.max_tokens == 1100
