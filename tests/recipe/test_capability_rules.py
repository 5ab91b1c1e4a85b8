"""What a model's family cannot do is a problem of the recipe, in the capability table's words."""

from __future__ import annotations

import json

import pytest

from vlmpack.capabilities.limits import (
    ENGINE_LIMITS,
    ENGINES,
    FEATURES,
    NO_EXPERTS,
    Limit,
    OnlyAttention,
)
from vlmpack.capabilities.served import SERVED, ServedModel
from vlmpack.capabilities.table import why_not
from vlmpack.capabilities.versions import TESTED
from vlmpack.recipe import capability_rules, rules

ASKS = {
    "in_batch": {"packing.mode": "in_batch"},
    "online": {"packing.mode": "online", "training.micro_batch_size": 1},
    "offline": {
        "packing.mode": "offline",
        "packing.path": "packs",
        "training.micro_batch_size": 1,
    },
    "CP": {"parallelism.context": 2},
    "TP": {"parallelism.tensor": 2},
    "SP": {"parallelism.tensor": 2, "parallelism.sequence": True},
    "PP": {"parallelism.pipeline": 2},
    "EP": {"parallelism.expert": 2},
    "LoRA": {"trainable.language": "lora"},
    "DPO": {"objective.name": "dpo"},
}
"""What a recipe says to have a feature. There is no key for CUDA graphs."""

SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}


@pytest.fixture(autouse=True)
def tested_versions(monkeypatch):
    monkeypatch.setattr(capability_rules, "installed_versions", lambda: TESTED)


@pytest.fixture
def model(tmp_path):
    """Write a config.json; the override that chooses its folder."""

    def write(model_type: str, **values: object) -> dict:
        served = SERVED.get(model_type)
        tower = {"model_type": served.towers[0]} if served and served.towers else {}
        config = {"model_type": model_type, "vision_config": tower} | SIZES | values
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return {"model.path": str(tmp_path)}

    return write


def test_every_feature_but_those_without_a_key_is_asked_for():
    assert set(FEATURES) - set(ASKS) == {"CUDA graphs"}


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize("model_type", SERVED)
def test_a_recipe_is_refused_where_the_table_says_no_and_nowhere_else(
    problems_of, model, model_type
):
    """Every engine and every feature: the problem has the cell's own reason."""
    served = SERVED[model_type]
    experts = {"num_experts": 4} if served.has_experts else {}
    chosen = model(model_type, **experts)
    refused = 0
    for engine in ENGINES:
        for feature, asked in ASKS.items():
            if served.has_experts and feature == "TP":
                asked = asked | {"parallelism.sequence": True}  # Megatron asks for it
            limit = why_not(served, engine, feature, TESTED)
            problems = problems_of(chosen | {"model.backend": engine} | asked)
            if limit is None:
                assert problems == [], (engine, feature)
            else:
                refused += 1
                reasons = {limit.reason}
                if limit is NO_EXPERTS and engine == "hf":  # where no experts are is not looked at
                    reasons.add(ENGINE_LIMITS[engine][feature].reason)
                found = [any(reason in problem for reason in reasons) for problem in problems]
                assert any(found), (engine, feature, problems)
    assert refused >= 4


def test_a_family_that_mcore_does_not_run(problems_of, model, monkeypatch):
    monkeypatch.setattr(rules, "SERVED", {"qwen3": ServedModel(title="Q", family="q")})
    chosen = model("qwen3")
    assert problems_of(chosen) == []
    (problem,) = problems_of(chosen | {"model.backend": "mcore"})
    assert problem.endswith(
        "model.backend: 'mcore', but Q has no weight map to megatron-core yet; "
        "use model.backend: hf"
    )
    problems = problems_of(chosen | {"parallelism.tensor": 2})
    assert any("parallelism.tensor: 2, but Q cannot: has no weight map to" in p for p in problems)


def test_a_family_that_one_attention_alone_can_run(problems_of, model, monkeypatch):
    served = ServedModel(
        title="Q", family="q", attention=OnlyAttention(("segments",), "images look both ways")
    )
    monkeypatch.setattr(rules, "SERVED", {"qwen3": served})
    chosen = model("qwen3")
    for name in ("auto", "segments"):
        assert problems_of(chosen | {"model.attention": name}) == []
    (problem,) = problems_of(chosen | {"model.attention": "flash_attn"})
    assert "model.attention: 'flash_attn' cannot run Q: images look both ways; use auto or " in (
        problem
    )


def test_a_feature_beyond_a_family(problems_of, model, monkeypatch):
    limits = {"online": Limit("its rows have one length", "use in_batch")}
    limits["CP"] = Limit("its images are not cut")
    served = ServedModel(title="Q", family="q", engines=("hf", "mcore"), limits=limits)
    monkeypatch.setattr(rules, "SERVED", {"qwen3": served})
    chosen = model("qwen3") | {"model.backend": "mcore"}
    assert problems_of(chosen) == []
    both = problems_of(chosen | ASKS["online"] | ASKS["CP"])
    assert "packing.mode: 'online', but Q cannot: its rows have one length; use in_batch" in (
        both[0] + both[1]
    )
    assert any("parallelism.context: 2, but Q cannot: its images are not cut" in p for p in both)


@pytest.mark.parametrize("model_type", ["internvl", "idefics3", "smolvlm", "gemma3"])
def test_images_that_fill_whole_tiles_are_not_shrunk_to_fit(problems_of, model, model_type):
    shrink = {"data.over_long": "shrink_images"}
    assert problems_of(model(model_type) | {"data.over_long": "drop"}) == []
    (problem,) = problems_of(model(model_type) | shrink)
    assert "data.over_long: 'shrink_images', but " in problem and "images.max_tiles" in problem
    for other in ("qwen2_vl", "llava_onevision", "mistral3"):
        assert problems_of(model(other) | shrink) == []


@pytest.mark.parametrize(
    ("model_type", "knobs", "instead"),
    [
        ("qwen2_5_vl", {"min_pixels", "max_pixels"}, "which has images.min_pixels and images.max_"),
        ("internvl", {"max_tiles"}, "which has images.max_tiles"),
        ("mistral3", {"max_pixels"}, "which has images.max_pixels"),
        ("llava_onevision", set(), "which has no bounds on images; leave it out"),
        ("qwen3", set(), "which has no bounds on images; leave it out"),
    ],
)
def test_bounds_on_images_are_those_of_the_family(problems_of, model, model_type, knobs, instead):
    for name in ("min_pixels", "max_pixels", "max_tiles"):
        problems = problems_of(model(model_type) | {f"images.{name}": 5000})
        assert [f"images.{name}: 5000, but the model is " in each for each in problems] == (
            [] if name in knobs else [True]
        )
        assert all(instead in each for each in problems)


@pytest.mark.parametrize("backend", ENGINES)
def test_refused_models_are_problems_of_the_recipe(problems_of, model, backend):
    (problem,) = problems_of(model("mamba") | {"model.backend": backend})
    assert "model.path: " in problem
    assert "model_type 'mamba' cannot be trained: " in problem and "selective_scan" in problem
    assert problems_of(model("qwen2", num_mtp_layers=1) | {"model.backend": backend}) == []
    (problem,) = problems_of(model("qwen9") | {"model.backend": backend})
    assert "no family of this version serves model_type 'qwen9', and transformers " in problem
    assert "; did you mean 'qwen" in problem


def test_a_class_that_no_family_of_ours_serves_has_no_router_loss_and_no_mcore(problems_of, model):
    chosen = model("mixtral", num_local_experts=4)
    assert problems_of(chosen) == []
    (problem,) = problems_of(chosen | {"model.router_aux_loss_coef": 0.01})
    assert "model.router_aux_loss_coef: 0.01, but no family of ours serves mixtral" in problem
    (problem,) = problems_of(chosen | {"model.backend": "mcore"})
    assert "model.backend: 'mcore', but mixtral has no weight map" in problem
    (problem,) = problems_of(chosen | {"objective.name": "dpo"})
    assert "objective.name: 'dpo', but mixtral cannot: no family of ours" in problem
    (problem,) = problems_of(chosen | {"images.max_pixels": 5000})
    assert "images.max_pixels: 5000, but the model is mixtral, which has no bounds" in problem


def test_adapters_need_peft(problems_of, model, monkeypatch):
    absent = TESTED | {"peft": None}
    monkeypatch.setattr(capability_rules, "installed_versions", lambda: absent)
    chosen = model("qwen2_vl")
    assert problems_of(chosen) == []
    (problem,) = problems_of(chosen | ASKS["LoRA"])
    assert "trainable.language: 'lora' needs peft, which is not installed" in problem


def test_a_folder_without_a_model_type_is_left_to_whoever_loads_it(problems_of, model, tmp_path):
    chosen = model("qwen2")
    (tmp_path / "config.json").write_text('{"model_type": 3}')
    assert problems_of(chosen) == []
    (tmp_path / "config.json").unlink()
    assert problems_of(chosen) == []


def test_all_that_is_wrong_comes_together_with_lines(problems_of, model, write, tmp_path):
    from vlmpack.errors import RecipeError
    from vlmpack.recipe import load_recipe

    folder = model("mamba")["model.path"]
    text = f"model:\n  path: {folder}\n  atention: auto\noptim: {{lr: 1e-3}}\n"
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(text))
    assert not any("Mamba" in problem for problem in caught.value.problems)
    path = write(text.replace("  atention: auto\n", ""))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (named,) = (problem for problem in caught.value.problems if "Mamba" in problem)
    assert named.startswith(f"{path}:2: model.path: ")
    assert len(caught.value.problems) > 1


def test_transformer_engine_has_no_layers_that_carry_state(problems_of, model):
    asked = {"model.backend": "mcore", "model.attention": "transformer_engine"}
    assert problems_of(model("qwen3_vl") | asked) == []
    (problem,) = problems_of(model("qwen3_5") | asked)
    assert "has none for those of Qwen3.5 that carry state; use auto, segments" in problem
