"""Every tensor of the published models is accounted for: trained, never reached, or kept unread.

A file with the published names and shapes, and no values, goes through the check that a launch
makes of a model folder; transformers' own loading says what it asks for.
"""

from __future__ import annotations

import json
import math
import re

import pytest
from support.published_gemma4 import CONFIGS
from support.published_hybrids import QWEN3_6_27B_PARAMETERS
from support.published_names import PUBLISHED_CONFIGS, published_names, text_form, write_header

from vlmpack.backends.hf.load import check_weights
from vlmpack.backends.policy import component_of, is_untouched
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.capabilities.config import is_prediction
from vlmpack.capabilities.refused import refusal
from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of

pytestmark = pytest.mark.slow

NAMES = published_names()

TOTALS = {
    # tensors, parameters as the published bytes of the index count them
    # Qwen3.5 stores A_log and the norm of its 18 linear layers in float32.
    "Qwen3.5-0.8B": (488, (1_746_882_752 - 2 * 18 * (16 + 128)) // 2),
    "Qwen3.6-27B": (1199, 55_562_855_904 // 2),
    "Qwen3.6-35B-A3B": (1045, 71_903_645_408 // 2),
    "Qwen3.8-2.4T-A95B": (1609, None),
    "Qwen3-VL-8B": (750, 17_534_247_392 // 2),
    "Nemotron-3-Nano-30B-A3B": (6243, 31_577_934_400 + 23_552 // 4),
    "Nemotron-3.5-Lightning-30B-A3B": (6243 + 270, None),
    "Gemma-4-E2B": (2011 - 751 - 1, None),
    "Gemma-4-E4B": (2130 - 751 - 1, None),
    "Gemma-4-31B": (1188, None),
    "Gemma-4-26B-A4B": (1013, 51_611_872_412 // 2),
}
"""As published. E2B and E4B: without 751 of the audio tower and one of its projector."""

KEPT = {
    "Qwen3.5-0.8B": 15,
    "Qwen3.6-27B": 15,
    "Qwen3.6-35B-A3B": 19,
    "Qwen3.8-2.4T-A95B": 19,
    "Nemotron-3.5-Lightning-30B-A3B": 270,
    "Gemma-4-E2B": 20 * 3,
    "Gemma-4-E4B": 18 * 3,
}
"""Tensors that training does not read: of multi-token prediction, and keys and values of layers
that reuse an earlier one's."""


@pytest.mark.parametrize("name", TOTALS)
def test_the_names_add_up_to_what_was_published(name):
    tensors, parameters = TOTALS[name]
    assert len(NAMES[name]) == tensors
    if parameters is not None:
        assert sum(map(math.prod, NAMES[name].values())) == parameters


def test_the_names_of_27b_are_those_that_were_printed():
    """A report prints every name with its shape."""
    assert NAMES["Qwen3.6-27B"] == QWEN3_6_27B_PARAMETERS
    whole = 2 * sum(map(math.prod, NAMES["Qwen3.8-2.4T-A95B"].values()))
    assert round(whole / 1e12, 2) == 4.89


def test_a_layer_has_what_a_header_of_e2b_has():
    """600 of the decoder and 658 of the tower at 9dbdf8a839e4, some of them by name and shape."""
    names = NAMES["Gemma-4-E2B"]
    for prefix, count in (("language_model", 600), ("vision_tower", 658), ("embed_vision", 1)):
        assert sum(name.startswith(f"model.{prefix}.") for name in names) == count
    layers = "model.language_model.layers"
    assert names["model.language_model.embed_tokens_per_layer.weight"] == [262144, 8960]
    for number in range(35):
        width = 512 if number % 5 == 4 else 256
        for one in "kv":
            assert names[f"{layers}.{number}.self_attn.{one}_proj.weight"] == [width, 1536]
    assert names["model.vision_tower.encoder.layers.0.self_attn.q_proj.input_max"] == []


def folder_of(tmp_path, config, shapes):
    """A model folder with such weights, and what its family says of it."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert refusal(config) is None
    family = family_of(tmp_path)
    model = model_skeleton(family.auto_class(), tmp_path)
    stored = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    audio = {n: s for n, s in stored.items() if re.match(r"model\.(audio_tower|embed_audio)\.", n)}
    write_header(tmp_path / "model.safetensors", {**shapes, **audio})
    return tmp_path, family, model, len(audio)


@pytest.mark.cases(slow=("Gemma-4-E4B", "Nemotron-3-Nano-30B-A3B", "Qwen3.6-35B-A3B"))
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_accounted_for(tmp_path, name):
    config = PUBLISHED_CONFIGS[name]
    folder, family, model, audio = folder_of(tmp_path, config, NAMES[name])
    assert audio == (752 if name in ("Gemma-4-E2B", "Gemma-4-E4B") else 0)
    unread = {tensor.name for tensor in check_weights(folder).unused}
    assert len(unread) == KEPT.get(name, 0) and unread <= set(NAMES[name])
    for one in unread:
        assert is_prediction(one, config) or re.search(r"self_attn\.(k_proj|v_proj|k_norm)", one)
    paths = family.modules
    reached = {n for n, _ in model.named_parameters() if not is_untouched(n, paths)}
    found = {component_of(n, paths) for n in reached}
    alone = "Nemotron" in name or "2.4T" in name
    assert found == ({"language"} if alone else {"vision", "projector", "language"})
    never = {n for n, _ in model.named_parameters()} - reached
    assert all("audio" in n for n in never) and bool(never) == bool(audio)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3.6-27B", "Qwen3.6-35B-A3B", "Gemma-4-31B"])
def test_the_text_form_of_each(tmp_path, name):
    """None is published but Qwen3.8-2.4T-A95B, which has the mixture's kinds of names."""
    config, shapes = text_form(PUBLISHED_CONFIGS[name], NAMES[name])
    folder, family, model, _ = folder_of(tmp_path, config, shapes)
    assert family.modules.vision is None and config["model_type"].endswith("_text")
    unread = {tensor.name for tensor in check_weights(folder).unused}
    assert len(unread) == KEPT.get(name, 0)
    head = {"lm_head.weight"}  # tied in Gemma
    assert set(model.state_dict()) - head == set(shapes) - unread - head
    if name == "Qwen3.6-35B-A3B":
        kinds = [
            {re.sub(r"\.\d+\.", ".N.", one) for one in names}
            for names in (shapes, NAMES["Qwen3.8-2.4T-A95B"])
        ]
        assert kinds[0] == kinds[1] and len(kinds[0]) == 46


@pytest.mark.cases(slow="Gemma-4-26B-A4B")
@pytest.mark.parametrize("name", ["Qwen3.6-27B", "Gemma-4-26B-A4B"])
def test_a_name_too_few_or_too_many_is_found(tmp_path, name):
    """The negative control."""
    config, shapes = PUBLISHED_CONFIGS[name], dict(NAMES[name])
    lost = "model.language_model.layers.7.self_attn.k_norm.weight"
    shape = shapes.pop(lost)
    folder, *_ = folder_of(tmp_path, config, shapes)
    with pytest.raises(ModelError, match="missing keys"):
        check_weights(folder)
    further = {lost: shape, "model.language_model.layers.7.self_attn.gate.weight": [8]}
    write_header(folder / "model.safetensors", shapes | further)
    with pytest.raises(ModelError, match=r"unexpected keys.*self_attn\.gate\.weight"):
        check_weights(folder)


def test_names_of_every_published_model_are_here():
    assert NAMES.keys() == PUBLISHED_CONFIGS.keys() == TOTALS.keys()
    assert {f"Gemma-4-{name}" for name in CONFIGS} < NAMES.keys()
