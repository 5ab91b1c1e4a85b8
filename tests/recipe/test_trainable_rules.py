"""What is trained has to fit the model, and the packages that are there."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from peft.utils.other import get_pattern_key

from vlmpack.recipe import load_recipe, trainable_rules
from vlmpack.recipe.identity import identity

LORA = {"trainable.language": "lora"}
NF4 = LORA | {"trainable.lora.quantize": "nf4"}


@pytest.fixture
def model(tmp_path):
    """A model folder with this config.json."""

    def make(**config):
        folder = tmp_path / "models" / "tiny"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainable.vision": "frozen"}, "trainable.vision: 'frozen', but models/tiny is a lang"),
        ({"trainable.projector": "lora"}, "trainable.projector: 'lora', but models/tiny is"),
        ({"trainable.language": "frozen"}, "so nothing would be trained"),
        ({"optim.vision_lr": 1e-4}, "optim.vision_lr: 0.0001, but models/tiny is a language"),
    ],
)
def test_a_language_model_alone_has_one_component(model, problems_of, overrides, message):
    alone = model(model_type="qwen3")
    assert [message in problem for problem in problems_of(overrides, base_dir=alone)] == [True]
    seeing = model(model_type="qwen3_vl", vision_config={})
    assert problems_of(overrides, base_dir=seeing) == []


def test_a_language_model_alone_takes_adapters(model, problems_of):
    assert problems_of(LORA, base_dir=model(model_type="qwen3")) == []


def test_optimizers_of_a_package_need_it(problems_of, monkeypatch):
    chosen = {"optim.name": "paged_adamw_8bit"}
    monkeypatch.setattr(trainable_rules, "has_bitsandbytes", lambda: False)
    (problem,) = problems_of(chosen)
    assert problem.endswith(
        "optim.name: 'paged_adamw_8bit' needs bitsandbytes, which is not installed; pip install "
        "'bitsandbytes>=0.50', or use adamw"
    )
    assert problems_of({"optim.name": "adamw"}) == []
    monkeypatch.setattr(trainable_rules, "has_bitsandbytes", lambda: True)
    assert problems_of(chosen) == []


def test_four_bits_need_their_package(problems_of, monkeypatch):
    monkeypatch.setattr(trainable_rules, "has_bitsandbytes", lambda: False)
    (problem,) = problems_of(NF4)
    assert problem.endswith(
        "trainable.lora.quantize: 'nf4' needs bitsandbytes, which is not installed; pip install "
        "'bitsandbytes>=0.50', or use int8, or none"
    )
    monkeypatch.setattr(trainable_rules, "has_bitsandbytes", lambda: True)
    assert problems_of(NF4) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainable.lora.rank": 0}, "trainable.lora.rank: expected an integer >= 1, found 0"),
        ({"trainable.lora.dropout": 1.0}, "trainable.lora.dropout: expected a number"),
        ({"trainable.vision": "freeze"}, "'freeze' is not one of frozen, full, lora"),
        ({"trainable.tower": "frozen"}, "unknown key"),
        ({"optim.vision_lr": 0.0}, "optim.vision_lr: expected a number > 0"),
        (LORA | {"trainable.lora.targets": "linear"}, "trainable.lora.targets: expected"),
        (LORA | {"trainable.lora.targets": [3]}, "trainable.lora.targets"),
    ],
)
def test_values_that_are_none(problems_of, overrides, message):
    problems = problems_of(overrides)
    assert problems
    assert all(message in problem for problem in problems)


def test_a_recipe_with_adapters_survives_its_own_dump(minimal):
    from vlmpack.recipe import dump_recipe
    from vlmpack.recipe.yaml_nodes import parse_yaml

    targets = {"trainable.lora.targets": ["q_proj", "self_attn.o_proj"]}
    recipe = load_recipe(minimal, LORA | targets)
    assert recipe.trainable.lora.targets == ("q_proj", "self_attn.o_proj")
    assert recipe.trainable.uses("lora") == ("language",)
    assert load_recipe(parse_yaml(dump_recipe(recipe), "").root) == recipe


@pytest.mark.parametrize("lora", [{"rank": 16}, {"rank": 16, "alpha": 32.0}, {"alpha": 8.0}])
def test_adapters_described_for_no_component_are_refused_whatever_the_values(
    minimal, problems_of, lora
):
    from vlmpack.recipe import dump_recipe
    from vlmpack.recipe.yaml_nodes import parse_yaml

    written = {f"trainable.lora.{name}": value for name, value in lora.items()}
    (problem,) = problems_of(written)
    assert f"{next(iter(lora.values()))}, but no component has mode lora" in problem
    assert problems_of(written | LORA) == []
    resolved = load_recipe(minimal)
    assert load_recipe(parse_yaml(dump_recipe(resolved), "").root) == resolved
    assert load_recipe(resolved, {"training.max_steps": 7}).training.max_steps == 7


def test_learning_rates_of_components(minimal):
    optim = load_recipe(minimal, {"optim.vision_lr": 1e-5}).optim
    assert (optim.peak("vision"), optim.peak("projector")) == (1e-5, 1e-3)


def test_megatron_has_no_layer_for_the_gate_of_a_shared_expert(problems_of, tmp_path):
    config = {"model_type": "qwen3_5_moe", "text_config": {"shared_expert_intermediate_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = {"model.path": str(tmp_path), "model.backend": "mcore", "trainable.language": "lora"}
    (problem,) = problems_of(asked)
    assert "trainable.lora.targets: 'all-linear', but model.backend: mcore puts no" in problem
    assert "adapters on shared_expert_gate. Name the others" in problem
    targets = {"trainable.lora.targets": ["q_proj", "in_proj_qkv"]}
    assert problems_of(asked | targets) == []
    assert problems_of(asked | {"model.backend": "hf"}) == []


def test_four_bits_of_the_other_engine_are_refused_once(problems_of, monkeypatch):
    monkeypatch.setattr(trainable_rules, "has_bitsandbytes", lambda: False)
    (problem,) = problems_of(NF4 | {"model.backend": "mcore"})
    assert "'nf4' needs model.backend: hf; use none" in problem
    (problem,) = problems_of(NF4)
    assert "needs bitsandbytes" in problem


@pytest.mark.parametrize(
    ("target", "ours"),
    [
        ("linear_qkv", "q_proj, k_proj, v_proj"),
        ("linear_proj", "o_proj"),
        ("*.layers.0.*.linear_fc1", "gate_proj, up_proj"),
        ("linear_fc2", "down_proj"),
    ],
)
def test_megatrons_names_are_answered_with_ours(problems_of, target, ours):
    named = LORA | {"trainable.lora.targets": ["q_proj", target]}
    (problem,) = problems_of(named)
    assert problem.endswith(f"{target!r} is Megatron's name; layers are named as in transformers "
                            f"on both engines: {ours}")  # fmt: skip
    seeing = problems_of(named | {"trainable.vision": "lora"})
    assert bool(seeing) == ("fc" not in target), "a tower of transformers has layers called so"


def test_a_folder_in_few_bits_is_packed_once_and_needs_its_package(
    problems_of, tmp_path, monkeypatch
):
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = {"model_type": "qwen2_5_vl", "quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    folder = {"model.path": str(tmp_path)}
    assert problems_of(folder | LORA) == []
    (problem,) = problems_of(folder | NF4)
    assert "trainable.lora.quantize: 'nf4', but the folder has its weights in few bits" in problem
    monkeypatch.setattr(trainable_rules, "has_bitsandbytes", lambda: False)
    (problem,) = problems_of(folder | LORA)
    assert "has its weights in 4 bits, which needs bitsandbytes, and that is not" in problem
    assert problems_of(folder) == [], "all of it is trained, dense"
    section["load_in_4bit"] = False
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert problems_of(folder | LORA) == []


@pytest.mark.parametrize("knob", ["rank_pattern", "alpha_pattern"])
def test_no_order_of_patterns_has_a_meaning_that_an_identity_lacks(problems_of, minimal, knob):
    """Every order of ends that loads gives each layer the same number."""
    layers = [f"layers.{n}.{kind}.{name}" for n in (1, 11) for kind in "ab" for name in "pq"]
    ends = {"p": 2, "a.p": 3, "1.a.p": 4, "layers.1.a.p": 5, "b.q": 6, "q": 7}
    meanings, refused = [], 0
    for order in permutations(ends):
        override = LORA | {f"trainable.lora.{knob}": {end: ends[end] for end in order}}
        if found := problems_of(override):
            refused += 1
            assert all("never counts, as" in problem for problem in found)
            continue
        recipe = load_recipe(minimal, override)
        of_layer = getattr(recipe.trainable.lora, knob.replace("pattern", "of"))
        meanings.append(([of_layer(layer) for layer in layers], identity(recipe)))
    assert 10 < len(meanings) < refused
    assert all(meaning == meanings[0] for meaning in meanings)


def test_ranks_and_scales_by_order_are_those_of_peft(problems_of, minimal):
    ends = {"layers.1.a.p": 5, "p": 2}
    lora = load_recipe(minimal, LORA | {"trainable.lora.rank_pattern": ends}).trainable.lora
    for layer in ("layers.1.a.p", "layers.11.a.p", "up"):
        assert lora.rank_of(layer) == ends.get(get_pattern_key([*ends], layer), lora.rank)
    (problem,) = problems_of(LORA | {"trainable.lora.rank_pattern": {"p": 2, "layers.1.a.p": 5}})
    assert problem.endswith(
        "trainable.lora.rank_pattern: 'layers.1.a.p' never counts, as 'p' comes first and fits the "
        "same layers; put 'layers.1.a.p' first, or leave one out"
    )
