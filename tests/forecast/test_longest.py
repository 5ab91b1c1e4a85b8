"""The longest row that a plan says fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import mode_of
from support.recipes import small_settings
from support.shards import TINY_MODEL

from vlmpack.forecast.activations import forms_on
from vlmpack.forecast.figures import LongestRow
from vlmpack.forecast.longest import Layout, longest_row, shared_layouts
from vlmpack.forecast.memory import LADDER, SHARE, memory_figures
from vlmpack.forecast.open import plan_recipe
from vlmpack.forecast.parameters import read_sizes
from vlmpack.recipe import load_recipe
from vlmpack.recipe.schema import ModelSection, ParallelismSection

GIB = 1 << 30
OF_A_TOKEN = 0.5  # patches


def totals(model: ModelSection, layout: Layout, tokens: int) -> list[int]:
    """Bytes under each recomputation that the model allows, on a GPU."""
    sizes, kinds = read_sizes(TINY_MODEL), (model.activation_checkpointing,)
    assert sizes is not None
    row = mode_of(max_row_slots=tokens, max_row_patches=int(tokens * OF_A_TOKEN))
    every = [
        model.model_copy(update={"activation_checkpointing": kind})
        for kind in (LADDER if kinds == ("auto",) else kinds)
    ]
    return [
        memory_figures(
            one,
            layout.parallelism,
            sizes,
            row,
            global_batch_size=16,
            world_size=layout.world_size,
            forms=forms_on(torch.device("cuda"), one, captured=False),
        ).total
        for one in every
    ]


def found(model: ModelSection, layout: Layout, room: int, **bound: int) -> LongestRow:
    sizes = read_sizes(TINY_MODEL)
    assert sizes is not None
    own = mode_of(max_row_slots=1000, max_row_patches=500)

    def estimate(model: ModelSection, layout: Layout, row: Any) -> Any:
        return memory_figures(
            model,
            layout.parallelism,
            sizes,
            row,
            global_batch_size=16,
            world_size=layout.world_size,
            forms=forms_on(torch.device("cuda"), model, captured=False),
        )

    def most_patches(patches: int) -> int:
        return min(patches, bound.get("max_patches", patches))

    return longest_row(model, layout, own, room, estimate, most_patches=most_patches)


@pytest.mark.parametrize("backend", ["hf", "mcore"])
@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("kind", ["auto", "none", "selective", "full"])
def test_it_fits_and_the_next_step_does_not(backend: str, context: int, kind: Any) -> None:
    model = ModelSection(
        path=str(TINY_MODEL), backend=backend, dtype="bfloat16", activation_checkpointing=kind
    )
    layout = Layout(ParallelismSection(context=context), 4, step=16 * context)
    room = 200 << 20
    row = found(model, layout, room)
    assert row.tokens > 100 * layout.step and row.tokens % layout.step == 0
    assert row.patches == row.tokens * OF_A_TOKEN
    assert row.total in totals(model, layout, row.tokens) and row.total <= SHARE * room
    for more in range(1, 10):
        assert min(totals(model, layout, row.tokens + more * layout.step)) > SHARE * room


def test_a_row_is_bounded_in_patches_and_may_not_exist() -> None:
    model = ModelSection(path=str(TINY_MODEL), dtype="bfloat16", activation_checkpointing="full")
    layout = Layout(ParallelismSection(), 1, step=8)
    free, bounded = found(model, layout, GIB), found(model, layout, GIB, max_patches=64)
    assert bounded.patches == 64 < free.patches and bounded.tokens > free.tokens
    none = found(model, layout, 1 << 20)
    assert (none.tokens, none.patches) == (0, 0)
    assert none.total == totals(model, layout, 8)[0] > 1 << 20


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, [(1, 2, 8), (2, 2, 8), (4, 4, 8), (8, 8, 16)]),
        ({"parallelism.context": 4}, [(1, 4, 8), (2, 4, 8), (4, 4, 8), (8, 8, 16)]),
        (
            {"packing.alignment": 24, "training.seq_length": 120},
            [(1, 2, 24), (2, 2, 8), (4, 4, 8), (8, 8, 16)],
        ),
        (
            {"model.backend": "mcore", "parallelism.tensor": 2},
            [(1, 2, 8), (2, 4, 8), (4, 8, 8), (8, 16, 16)],
        ),
        ({"packing.share_prefix": True}, [(1, 2, 8)]),
        ({"training.global_batch_size": 1}, [(2, 2, 8), (4, 4, 8), (8, 8, 16)]),
    ],
)
def test_layouts_are_those_that_the_rules_allow(
    tmp_path: Path, changes: dict[str, Any], found: list[tuple[int, int, int]]
) -> None:
    online = {"packing.mode": "online", "training.micro_batch_size": 1}
    recipe = load_recipe(load_recipe(small_settings(tmp_path)), online | changes)
    made = list(shared_layouts(recipe, 4 if recipe.parallelism.context == 4 else 2))
    assert [(one.parallelism.context, one.world_size, one.step) for one in made] == found


def test_sizes_that_heads_refuse_are_left_out(tmp_path: Path) -> None:
    """Latent attention takes no ring, and six heads are divided by 1 and 2."""
    config = json.loads((TINY_MODEL / "config.json").read_text())
    config["text_config"] |= {
        "kv_lora_rank": 8, "num_attention_heads": 6, "num_key_value_heads": 6
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = load_recipe(small_settings(tmp_path, model__path=str(tmp_path)))
    assert [one.parallelism.context for one in shared_layouts(recipe, 1)] == [1, 2]


def test_it_is_in_the_plan_of_a_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(small_settings(tmp_path, model__memory_gib=0.25))
    longest = plan_recipe(recipe, world_size=1).longest
    assert longest is not None and longest.own == 1
    assert longest.where == "90% of the 256.0 MiB of model.memory_gib"
    assert [row.context for row in longest.rows] == [1, 2, 4, 8]
    lengths = [row.tokens for row in longest.rows]
    assert lengths == sorted(set(lengths)) and lengths[0] > 0
    assert all(row.total <= longest.room for row in longest.rows)
