"""The plan's memory follows what is trained: bytes beside those that an engine really holds."""

from __future__ import annotations

from typing import Any

import pytest
from support.engines import make_engine, make_stepper
from support.plans import mode_of
from support.shards import ROOT, TINY_MODEL

from vlmpack.build.engine import policy_of
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import EVERY_WEIGHT, trained_sizes
from vlmpack.packing import PackCollator
from vlmpack.recipe import Recipe, load_recipe

LORA = {"trainable.vision": "frozen", "trainable.language": "lora"}
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "adapters": LORA,
    "all dora": {
        "trainable.vision": "lora",
        "trainable.projector": "lora",
        "trainable.language": "lora",
        "trainable.lora.dora": True,
        "trainable.lora.rank": 3,
    },
    "projector": {"trainable.vision": "frozen", "trainable.language": "frozen"},
}


def recipe_of(changes: dict[str, Any], dtype: str = "float32") -> Recipe:
    values = {"model.path": str(TINY_MODEL), "model.dtype": dtype, **changes}
    return load_recipe(ROOT / "recipes/digits-demo.yaml", values)


def memory(recipe: Recipe, encoder: Any, world_size: int = 1) -> Any:
    sizes = read_sizes(TINY_MODEL)
    assert sizes is not None
    trained = trained_sizes(policy_of(recipe), encoder)
    mode = mode_of(max_row_slots=512, max_row_patches=64)
    return memory_figures(
        recipe.model,
        recipe.parallelism,
        sizes,
        mode,
        global_batch_size=recipe.training.global_batch_size,
        world_size=world_size,
        trained=trained,
    )


@pytest.mark.cases(slow="all")
@pytest.mark.parametrize("case", ["adapters", "all dora", "all", "projector"])
def test_bytes_are_those_that_an_engine_holds(
    tiny_folder: Any, encoder: Any, encoded: Any, case: str
) -> None:
    recipe = recipe_of(CASES[case])
    engine = make_engine(tiny_folder, encoder, policy=policy_of(recipe))
    collate = PackCollator(pad_token_id=561, num_position_axes=3)
    make_stepper(engine).train(0, [collate(encoded)], num_skipped=0, stop=False)
    found, trained = memory(recipe, encoder), trained_sizes(policy_of(recipe), encoder)
    held = [p for _, p in engine.vlm.model.named_parameters()]
    assert found.weights == sum(p.nbytes for p in held)
    assert found.gradients == sum(p.grad.nbytes for p in held if p.grad is not None)
    moments = [state[k] for state in engine.optimizer.state.values() for k in state if k != "step"]
    assert found.optimizer == sum(moment.nbytes for moment in moments)
    assert found.rank_trained == sum(p.numel() for _, p in engine.parameters())
    assert (trained == EVERY_WEIGHT) == (case == "all")
    if trained != EVERY_WEIGHT:
        assert list(trained.counts) == list(engine.components)


@pytest.mark.cases(slow="bfloat16-2")
@pytest.mark.parametrize(("dtype", "number"), [("float32", 4), ("bfloat16", 2)])
def test_a_trained_head_makes_its_gradient_beside_the_sum(
    encoder: Any, dtype: str, number: int
) -> None:
    trained, frozen = (
        memory(recipe_of(CASES[name], dtype), encoder) for name in ("all", "adapters")
    )
    sizes = read_sizes(TINY_MODEL)
    assert sizes is not None
    assert trained.logits - frozen.logits == (4 + number) * sizes.vocabulary * sizes.hidden


@pytest.mark.slow
def test_what_is_trained_on_each_rank(encoder: Any) -> None:
    everything = memory(recipe_of({}, "bfloat16"), encoder)
    total = everything.rank_parameters
    tower = {count.component: count.parameters for count in trained_sizes(
        policy_of(recipe_of(CASES["projector"])), encoder).counts}  # fmt: skip
    adapters = memory(recipe_of(LORA, "bfloat16"), encoder)
    added = adapters.rank_trained - tower["projector"]
    # Weights in float32, and copies in bfloat16 of all that a gradient passes; but for frozen
    # matrices, which lie in bfloat16 as the folder has them.
    sizes = trained_sizes(policy_of(recipe_of(LORA)), encoder)
    assert 0.9 * (total - tower["projector"]) < sizes.narrow < total
    in_front = sizes.narrow - sizes.narrow_in_graph
    assert 0.75 * tower["vision"] < in_front <= tower["vision"]
    copied = total + added - tower["vision"] - sizes.narrow_in_graph
    assert adapters.weights == 4 * (total + added) - 2 * sizes.narrow + 2 * copied
    assert adapters.activations < everything.activations, "a frozen tower keeps none"
    sharded = memory(recipe_of({**LORA, "parallelism.sharding": "fsdp"}), encoder, 4)
    assert sharded.gradients == 4 * -(-adapters.rank_trained // 4)

    mcore = {"model.backend": "mcore", "trainable.vision": "frozen"}
    no_tower = memory(recipe_of(mcore, "bfloat16"), encoder, 2)
    assert no_tower.rank_trained == total - tower["vision"]
    assert no_tower.weights == 2 * total
    assert no_tower.gradients == 4 * no_tower.rank_trained
    assert no_tower.optimizer == 6 * no_tower.rank_trained
    staged = mcore | {"trainable.language": "frozen", "parallelism.pipeline": 2}
    first = memory(recipe_of(staged, "bfloat16"), encoder, 2)
    assert first.where == "first pipeline stage"
    assert first.rank_trained == tower["projector"]


@pytest.mark.soak
def test_four_bits(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmpack.recipe import trainable_rules

    monkeypatch.setattr(trainable_rules, "has_bitsandbytes", lambda: True)
    plain = memory(recipe_of(LORA), encoder)
    recipe = recipe_of({**LORA, "trainable.lora.quantize": "nf4"})
    packed = memory(recipe, encoder)
    trained = trained_sizes(policy_of(recipe), encoder)
    # Queries and outputs of 128, keys and values of 64, an MLP of 384, in four layers of 128.
    whole, block, _ = trained.packed
    assert whole.weights == 4 * 128 * (2 * 128 + 2 * 64 + 3 * 384) == 4 * block.weights
    assert packed.weights == plain.weights - 4 * whole.weights + whole.bytes
    # Half a byte, and a scale of 8 bits for 64 of them; then a float for 256 scales and a table.
    assert 0 < whole.bytes - (0.5 + 1 / 64) * whole.weights < 28 * (1024 + 100)
    assert packed.optimizer == plain.optimizer


@pytest.mark.soak
def test_adapters_of_megatron_are_cut_with_their_layers(encoder: Any) -> None:
    """Rank 16 in four layers of 128; queries and outputs of 128, keys and values of 64, 384."""
    mcore = {"model.backend": "mcore", "trainable.projector": "frozen", **LORA}
    whole = memory(recipe_of(mcore), encoder).rank_trained
    column_a, column_b = 16 * 5 * 128, 16 * (128 + 2 * 64 + 2 * 384)
    row_a, row_b = 16 * (128 + 384), 16 * 2 * 128
    assert whole == 4 * (column_a + column_b + row_a + row_b)
    cut = memory(recipe_of(mcore | {"parallelism.tensor": 2}), encoder, 2)
    assert cut.rank_trained == 4 * (column_a + column_b // 2 + row_a // 2 + row_b)
    assert cut.weights == 4 * (cut.rank_parameters + cut.rank_trained)
    staged = memory(recipe_of(mcore | {"parallelism.pipeline": 2}), encoder, 2)
    assert staged.rank_trained == whole // 2
    tower = {**mcore, "trainable.vision": "lora", "trainable.projector": "lora"}
    with_tower = memory(recipe_of(tower | {"parallelism.pipeline": 2}), encoder, 2)
    alone = memory(recipe_of(tower), encoder).rank_trained - whole
    assert with_tower.rank_trained == whole // 2 + alone


def test_the_whole_copy_that_answers_is_counted_where_the_model_lies_in_parts() -> None:
    sizes = read_sizes(TINY_MODEL)
    assert sizes is not None
    wide = sizes.embedding + sizes.vectors

    def figures(world_size: int, *, answers: bool = True, **split: Any) -> Any:
        section = {f"parallelism.{name}": value for name, value in split.items()}
        recipe = recipe_of(section, "bfloat16")
        return memory_figures(
            recipe.model, recipe.parallelism, sizes, mode_of(max_row_slots=8, max_row_patches=4),
            global_batch_size=16, world_size=world_size, answers=answers,
        )  # fmt: skip

    asked, silent = (figures(2, sharding="fsdp", answers=answers) for answers in (True, False))
    assert asked.answers == 2 * (sizes.parameters - wide) + 4 * wide
    step = silent.activations - silent.again + max(silent.again, silent.logits)
    assert asked.total - silent.total == asked.answers - step > 0, "in the place of a step"
    assert silent.answers == figures(1, sharding="fsdp").answers == figures(2).answers == 0
