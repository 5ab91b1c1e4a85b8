"""What Gemma 4 costs, layer by layer, from the sizes that are published."""

from __future__ import annotations

import json

import pytest
import torch
from support.families import tiny_family_folder
from support.published_gemma4 import CONFIGS, TOWER_TENSORS

from vlmpack.backends.skeleton import model_skeleton
from vlmpack.capabilities.refused import refusal
from vlmpack.errors import ModelError
from vlmpack.families.configs import whole_config
from vlmpack.families.gemma4 import largest_head, layer_shapes
from vlmpack.families.registry import family_of
from vlmpack.forecast.parameters import read_sizes


def linear_weights(model):
    """Weights of the decoder's linear layers that one token passes through."""
    text = model.config.text_config
    total = 0
    for name, module in model.model.language_model.named_modules():
        if isinstance(module, torch.nn.Linear):
            total += module.weight.numel()
        elif name.endswith(".experts"):
            each = sum(p.numel() for p in module.parameters()) // text.num_experts
            total += each * text.top_k_experts
    return total


@pytest.mark.cases(quick="31B", slow="E2B")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_cost_of_the_published_models(tmp_path, name):
    """Against transformers' class, built without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    family = family_of(tmp_path)
    model = model_skeleton(family.auto_class(), tmp_path)
    cost = family.cost_model(CONFIGS[name])
    assert cost.per_token == 6 * linear_weights(model)
    inner = sum(layer.self_attn.q_proj.out_features for layer in model.model.language_model.layers)
    assert cost.per_squared_length == 6 * inner
    assert cost.per_label_token == 6 * model.lm_head.weight.numel()
    vision = model.config.vision_config
    tower = sum(
        module.weight.numel()
        for module in model.model.vision_tower.modules()
        if isinstance(module, torch.nn.Linear)
    )
    projector = sum(p.numel() for p in model.model.embed_vision.parameters())
    assert cost.per_patch == 6 * (tower + projector / 9)
    attention, averages = 4 * vision.num_hidden_layers, 2 / 9
    assert cost.per_squared_patches == pytest.approx(
        3 * vision.hidden_size * (attention + averages), rel=1e-12
    )


@pytest.mark.cases(quick="31B*", slow="E2B*")
@pytest.mark.parametrize(
    ("name", "whole", "effective"),
    [("E2B", 5.1, 2.3), ("E4B", 7.9, 4.6), ("31B", 31.3, 30.7), ("26B-A4B", 25.8, 25.2)],
)
def test_the_published_sizes_are_those_of_their_names(tmp_path, name, whole, effective):
    """In 10^9 parameters: of the whole model, and of the decoder without the table of per-layer
    inputs, which the E of the small ones leaves out."""
    assert refusal(CONFIGS[name]) is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = model_skeleton(family_of(tmp_path).auto_class(), tmp_path)
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    decoder = sum(
        size
        for n, size in sizes.items()
        if ".language_model." in n and "embed_tokens_per_layer" not in n
    )
    assert round(sum(sizes.values()) / 1e9, 1) == whole
    assert round(decoder / 1e9, 1) == effective
    if name == "26B-A4B":
        tensors = [n for n in model.state_dict() if n.startswith("model.vision_tower.")]
        assert len(tensors) == TOWER_TENSORS


@pytest.mark.cases(quick="31B", slow="E2B")
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_as_the_class_builds_them(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = model_skeleton(family_of(tmp_path).auto_class(), tmp_path)
    text = CONFIGS[name]["text_config"]
    shapes = layer_shapes(whole_config(text))
    assert largest_head(text) == 512
    kinds = set()
    for shape, layer in zip(shapes, model.model.language_model.layers, strict=True):
        attention = layer.self_attn
        projections = [getattr(attention, n, None) for n in ("k_proj", "v_proj")]
        found = [linear.out_features for linear in projections if linear is not None]
        assert found == [shape.key] * shape.projections
        assert attention.q_proj.out_features == shape.inner
        assert layer.mlp.up_proj.out_features == shape.mlp
        kinds.add(shape)
    assert len(kinds) == (4 if text["num_kv_shared_layers"] else 2)


@pytest.mark.cases(quick="gemma4", slow="gemma4-mixture")
@pytest.mark.parametrize("name", ["gemma4", "gemma4-dense", "gemma4-mixture", "gemma4_text"])
def test_memory_is_estimated_from_the_folder(tmp_path, name):
    folder = tiny_family_folder(name, tmp_path)
    model = model_skeleton(family_of(folder).auto_class(), folder)
    sizes = read_sizes(folder)
    parameters = sum(p.numel() for p in model.parameters())
    state = model.state_dict()
    buffers = sum(state[name].numel() for name, _ in model.named_buffers() if name in state)
    assert parameters <= sizes.parameters <= parameters + buffers
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert sizes.experts == experts
    assert bool(experts) == (name == "gemma4-mixture") == bool(sizes.decoder[0].choices)
    if name == "gemma4-mixture":
        assert {(layer.choices, layer.mlp) for layer in sizes.decoder} == {(2, 160 + 2 * 56)}


def test_a_size_that_is_no_number_is_named(tmp_path):
    config = CONFIGS["E2B"]["text_config"] | {"hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["E2B"]["text_config"]))
    with pytest.raises(ModelError, match=r"config\.json: .*hidden_size"):
        family_of(tmp_path).cost_model(config)
