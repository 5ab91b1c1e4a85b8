"""What `model.activation_checkpointing: auto` comes to."""

from __future__ import annotations

from typing import Any

import pytest
from support.plans import mode_of
from support.shards import TINY_MODEL

from vlmpack.forecast.figures import MemoryFigures
from vlmpack.forecast.memory import LADDER, SHARE, least_that_fits, memory_figures, next_rung
from vlmpack.forecast.parameters import read_sizes
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.words import sized

ALONE = ParallelismSection()


def estimate(model: ModelSection) -> MemoryFigures:
    """Of the tiny model over a long row, where activations are most of it."""
    sizes = read_sizes(TINY_MODEL)
    assert sizes is not None
    mode = mode_of(max_row_slots=100_000, max_row_patches=0)
    return memory_figures(
        model, ParallelismSection(), sizes, mode, global_batch_size=16, world_size=1
    )


def section(**values: Any) -> ModelSection:
    return ModelSection(path=str(TINY_MODEL), dtype="bfloat16", **values)


def test_a_number_is_said_in_words():
    assert estimate(section(activation_checkpointing=3)).recomputed == "one layer in 3"
    assert estimate(section(activation_checkpointing=1)).recomputed == "every layer"


def total(value: Any) -> int:
    return estimate(section(activation_checkpointing=value)).total


def test_auto_is_the_least_that_fits():
    totals = {value: total(value) for value in LADDER}
    for room in (
        10**6,
        *(round(size / SHARE) + extra for size in totals.values() for extra in (-9, 9)),
    ):
        model, figures = least_that_fits(section(), ALONE, estimate, room, "a device")
        fitting = [value for value in LADDER if totals[value] <= SHARE * room]
        assert model.activation_checkpointing == (fitting[0] if fitting else "full")
        assert figures.total == totals[model.activation_checkpointing]
    assert (
        len(
            {
                least_that_fits(section(), ALONE, estimate, round(size / SHARE) + 9, "")[
                    0
                ].recomputed
                for size in totals.values()
            }
        )
        >= 3
    ), "hardly any value is ever chosen"


def test_the_next_value_needs_less_memory():
    """Here `selective` needs less than one layer in 4, which stands behind it in LADDER."""
    assert total(4) > total("selective")
    for value in LADDER:
        following = next_rung(section(activation_checkpointing=value), ALONE)
        assert (following is None) == (value == "full")
        assert following is None or total(following) <= total(value)


def test_auto_says_why():
    room = round(total("selective") / SHARE) + 9
    _, figures = least_that_fits(section(), ALONE, estimate, room, "cuda:0")
    for words in ("all but matrix products", "auto: about", "90% of", "cuda:0", "too large: none"):
        assert words in figures.recomputed
    none = f"too large: none at {sized(total('none'))}"
    assert figures.recomputed.endswith(f"90% of the {sized(room)} of cuda:0; {none})")
    _, figures = least_that_fits(section(), ALONE, estimate, 1, "cuda:0")
    assert figures.recomputed.startswith("every layer (auto")
    assert "does not fit either" in figures.recomputed


@pytest.mark.cases(slow="segments-split2-True")
@pytest.mark.parametrize(
    ("attention", "split", "is_kept"),
    [
        ("transformer_engine", ALONE, False),
        ("segments", ParallelismSection(tensor=2), False),
        ("segments", ParallelismSection(tensor=2, sequence=True), True),
    ],
)
def test_auto_leaves_selective_out_where_products_cannot_be_kept(attention, split, is_kept):
    """They are not seen, or something writes over them."""
    asked = section(backend="mcore", attention=attention)
    chosen = {
        least_that_fits(asked, split, estimate, room, "")[0].activation_checkpointing
        for room in range(10**8, 2 * 10**10, 5 * 10**8)
    }
    assert ("selective" in chosen) is is_kept and {"none", "full"} <= chosen


def test_what_a_recipe_may_say():
    assert section().recomputed == "none"
    assert section(activation_checkpointing=3).recomputed == 3
    assert section(activation_checkpointing="auto").recomputed == "none", "until it is settled"
    for bad in (0, -1, 2.5, "some", True, False):
        with pytest.raises(ValueError):
            section(activation_checkpointing=bad)
