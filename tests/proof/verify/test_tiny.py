"""A config.json with fewer layers keeps one of every kind, and what is said of each layer."""

from __future__ import annotations

import pytest
from support.published_hybrids import NEMOTRON_3_NANO as NEMOTRON
from transformers import NemotronHConfig

from vlmpack.proof.verify.run import cut_layers


def test_layers_are_cut_to_one_period_of_every_kind():
    config = {
        "text_config": {
            "num_hidden_layers": 48,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
            "mlp_only_layers": [0, 20],
            "max_window_layers": 48,
            "hidden_size": 48,
        },
        "vision_config": {"depth": 32, "fullatt_block_indexes": [7, 15, 23, 31]},
    }
    cut = cut_layers(config)
    text, vision = cut["text_config"], cut["vision_config"]
    assert text["num_hidden_layers"] == len(text["layer_types"]) == 4
    assert set(text["layer_types"]) == {"linear_attention", "full_attention"}
    assert text["mlp_only_layers"] == [0]
    assert text["max_window_layers"] == 3
    assert text["hidden_size"] == 48
    assert vision == {"depth": 3, "fullatt_block_indexes": [2]}
    assert config["vision_config"]["depth"] == 32, "the argument is left alone"


def test_deep_features_stay_in_a_cut_tower():
    cut = cut_layers({"vision_config": {"depth": 27, "deepstack_visual_indexes": [8, 16, 24]}})
    assert cut["vision_config"] == {"depth": 3, "deepstack_visual_indexes": [2]}


def test_kinds_without_a_period_are_all_kept():
    kinds = ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv"]
    cut = cut_layers({"num_hidden_layers": 7, "layer_types": kinds})
    assert cut["layer_types"] == kinds[:3]
    kinds = ["a", "a", "b", "a", "b", "b"]
    assert cut_layers({"num_hidden_layers": 6, "layer_types": kinds})["layer_types"] == kinds[:3]


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        ({"hybrid_override_pattern": "MEMEM*EMEMEM*"}, {"hybrid_override_pattern": "MEMEM*"}),
        (
            {"num_hidden_layers": 8, "hybrid_override_pattern": "M-M*M-M*"},
            {"num_hidden_layers": 4, "hybrid_override_pattern": "M-M*"},
        ),
        ({"layers_block_type": [*"mmhmmh"]}, {"layers_block_type": [*"mmh"]}),
        (
            {"num_hidden_layers": 9, "block_types": [*"rra"], "name": "123456789"},
            {"num_hidden_layers": 3, "block_types": [*"rra"], "name": "123456789"},
        ),
        (
            {"num_hidden_layers": 6, "full_attn_idxs": [2, 5], "mlp_layer_types": [*"dssdss"]},
            {"num_hidden_layers": 3, "full_attn_idxs": [2], "mlp_layer_types": [*"dss"]},
        ),
    ],
)
def test_hybrids_keep_a_layer_of_every_kind(config, cut):
    assert cut_layers(config) == cut


def test_a_published_hybrid_keeps_its_kinds_of_layers():
    whole, cut = (NemotronHConfig(**each) for each in (NEMOTRON, cut_layers(NEMOTRON)))
    assert len(whole.layers_block_type) == 52
    assert cut.layers_block_type == whole.layers_block_type[:6]
    assert set(cut.layers_block_type) == set(whole.layers_block_type)
    assert len(set(whole.layers_block_type)) == 3


def test_layers_that_reuse_keys_are_cut_with_those_that_they_reuse():
    kinds = ["sliding", "sliding", "full"] * 4
    own = {str(layer): {"head_dim": 512} for layer in (2, 5, 8, 11)}
    config = {"num_hidden_layers": 12, "layer_types": kinds, "num_kv_shared_layers": 7}
    cut = cut_layers(config | {"per_layer_config": own, "rope": {"full": {}, "sliding": {}}})
    assert (cut["num_hidden_layers"], cut["num_kv_shared_layers"]) == (6, 3)
    assert set(cut["layer_types"][:3]) == set(kinds), "each kind is there to be reused"
    assert set(cut["per_layer_config"]) == {"2", "5"}
    assert set(cut["rope"]) == {"full", "sliding"}


def test_a_model_that_is_small_already_stays(tmp_path):
    config = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    assert cut_layers(config) == config
