"""Layers of a decoder, told apart by their tensors: of tiny models and of published sizes."""

from __future__ import annotations

import json
import math

import pytest
from support.families import tiny_family_folder
from support.published_gemma4 import CONFIGS as GEMMA4
from support.published_hybrids import (
    NEMOTRON_3_NANO,
    QWEN3_6_27B,
    QWEN3_6_27B_PARAMETERS,
)
from support.weight_headers import write_headers

from vlmpack.backends.skeleton import model_skeleton
from vlmpack.families.registry import family_of
from vlmpack.forecast.parameters import (
    LayerSizes,
    RecurrentSizes,
    UnknownSizesError,
    decoder_layers,
    read_sizes,
)

SCAN = RecurrentSizes(kind="scan", channels=208, heads=8, keys=24, key_width=12, inner=160)
RULE = RecurrentSizes(kind="delta_rule", channels=128, heads=4, keys=24, key_width=12, inner=80)
EXPERTS = {"mlp": 2 * 40 + 48, "sent": 2 * 64, "choices": 2, "shared": 48}
KV_SHARED = {"norms": 5, "own_input": 20, "mlp": 320}
TINY = {
    "nemotron_h": [
        LayerSizes(norms=1, recurrent=SCAN),
        LayerSizes(norms=1, mlp=160, gated=False),
        LayerSizes(norms=1, query=96, key=48),
        LayerSizes(norms=1, gated=False, **EXPERTS),
        LayerSizes(norms=1, recurrent=SCAN),
    ],
    "qwen3_5_moe": [
        *[LayerSizes(recurrent=RULE, **EXPERTS)] * 2,
        LayerSizes(query=96, key=48, gate=96, head_norms=144, **EXPERTS),
        LayerSizes(recurrent=RULE, **EXPERTS),
    ],
    "gemma4": [
        LayerSizes(norms=5, own_input=20, query=96, key=48, head_norms=144, mlp=160),
        LayerSizes(norms=5, own_input=20, query=160, key=80, head_norms=240, mlp=160),
        LayerSizes(norms=5, own_input=20, query=96, key=48, head_norms=144, mlp=160),
        LayerSizes(query=160, head_norms=160, **KV_SHARED),
        LayerSizes(query=96, head_norms=96, **KV_SHARED),
        LayerSizes(query=160, head_norms=160, **KV_SHARED),
    ],
    # Keys and values are made for every head from one narrow vector.
    "deepseek_v3": [
        LayerSizes(query=80, key=72, mlp=160),
        *[LayerSizes(query=80, key=72, mlp=2 * 40 + 40, sent=128, choices=2, shared=40)] * 2,
    ],
}


@pytest.mark.parametrize("name", TINY)
def test_layers_of_tiny_models(tmp_path, name):
    sizes = read_sizes(tiny_family_folder(name, tmp_path))
    assert list(sizes.decoder) == TINY[name]


def published(folder, config):
    """A folder with headers alone, under the names of transformers' class, and its parameters."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = model_skeleton(family_of(folder).auto_class(), folder)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    write_headers(folder, shapes)
    return shapes


def test_published_nemotron_h(tmp_path):
    shapes = published(tmp_path, NEMOTRON_3_NANO)
    sizes = read_sizes(tmp_path)
    assert sizes.parameters == sum(map(math.prod, shapes.values()))
    assert sizes.embedding == sizes.head == 131072 * 2688
    kinds = "".join(
        "M" if one.recurrent else "*" if one.query else "E" if one.choices else "-"
        for one in sizes.decoder
    )
    assert kinds == NEMOTRON_3_NANO["hybrid_override_pattern"]
    assert sizes.decoder[0].recurrent == RecurrentSizes(
        kind="scan", channels=64 * 64 + 2 * 8 * 128, heads=64, keys=8 * 128, key_width=128,
        inner=64 * 64,
    )  # fmt: skip
    assert sizes.decoder[1] == LayerSizes(
        norms=1, gated=False, mlp=6 * 1856 + 3712, sent=6 * 2688, choices=6, shared=3712
    )


def test_published_qwen_without_its_prediction_layers(tmp_path):
    """Those are in the files and never loaded."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_6_27B), encoding="utf-8")
    write_headers(tmp_path, {name: tuple(s) for name, s in QWEN3_6_27B_PARAMETERS.items()})
    sizes = read_sizes(tmp_path)
    loaded = {name for name in QWEN3_6_27B_PARAMETERS if not name.startswith("mtp.")}
    assert 15 + len(loaded) == len(QWEN3_6_27B_PARAMETERS)
    assert sizes.parameters == sum(math.prod(QWEN3_6_27B_PARAMETERS[name]) for name in loaded)
    assert sizes.num_layers == 64
    rule = RecurrentSizes(
        kind="delta_rule", channels=10240, heads=48, keys=16 * 128, key_width=128, inner=48 * 128
    )
    assert sizes.decoder[:3] == (LayerSizes(mlp=17408, recurrent=rule),) * 3
    assert sizes.decoder[3] == LayerSizes(
        query=24 * 256, key=4 * 256, gate=24 * 256, head_norms=28 * 256, mlp=17408
    )


@pytest.mark.cases(quick="31B", slow="E4B")
@pytest.mark.parametrize("name", GEMMA4)
def test_published_gemma4(tmp_path, name):
    shapes = published(tmp_path, GEMMA4[name])
    sizes, text = read_sizes(tmp_path), GEMMA4[name]["text_config"]
    assert sizes.parameters == sum(map(math.prod, shapes.values()))
    assert sizes.num_layers == text["num_hidden_layers"]
    own = text["hidden_size_per_layer_input"]
    assert {one.own_input for one in sizes.decoder} == {own}
    per_layer = text["vocab_size_per_layer_input"] * own * sizes.num_layers
    assert sizes.embedding == text["vocab_size"] * text["hidden_size"] + per_layer
    reading = sum(one.key == 0 for one in sizes.decoder)
    assert reading == text["num_kv_shared_layers"]
    assert {one.choices for one in sizes.decoder} == {text.get("top_k_experts") or 0}


def test_names_that_nobody_knows_leave_it_to_the_config(tmp_path):
    text = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 100,
    }  # fmt: skip
    told = (LayerSizes(query=64, key=32, mlp=256),) * 2
    assert decoder_layers({"blocks.0.weight": (64, 64)}, text) == told
    odd = {f"model.layers.{n}.wide.weight": (256, 64) for n in range(2)}
    assert decoder_layers(odd, text) == told
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 100}))
    write_headers(tmp_path, odd)
    with pytest.raises(UnknownSizesError, match="does not say 'num_attention_heads'"):
        read_sizes(tmp_path)
