"""Which tensors of a model folder are multi-token prediction, by what config.json counts."""

from __future__ import annotations

import pytest

from vlmpack.capabilities.config import (
    PREDICTION_LAYERS,
    is_prediction,
    prediction_entries,
    prediction_layers,
)

DEEP = {"num_hidden_layers": 61, "num_nextn_predict_layers": 2}


@pytest.mark.parametrize("key", PREDICTION_LAYERS)
@pytest.mark.parametrize("section", [None, "text_config", "llm_config"])
def test_what_config_json_counts(key, section):
    values = {key: 2, "num_hidden_layers": 4}
    config = values if section is None else {section: values}
    assert prediction_layers(config) == (key, 2)
    assert is_prediction("model.layers.4.eh_proj.weight", config)
    assert prediction_layers({**config, section or key: None}) is None


@pytest.mark.parametrize("count", [0, None, "1"])
def test_without_a_count_there_is_none(count):
    config = {**DEEP, "num_nextn_predict_layers": count}
    assert prediction_layers(config) is None
    assert not is_prediction("mtp.layers.0.weight", config)
    assert not is_prediction("model.layers.61.weight", config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mtp.fc.weight", True),
        ("model.mtp.layers.0.norm.weight", True),
        ("model.mtp_layers.0.norm.weight", True),
        ("nextn_predict.weight", True),
        ("model.layers.61.embed_tokens.weight", True),
        ("model.language_model.layers.62.norm.weight", True),
        ("model.layers.60.mlp.up_proj.weight", False),
        ("model.layers.63.mlp.up_proj.weight", False),
        ("model.layers.6x.weight", False),
        ("vision_tower.layers.61.weight", False),
        ("model.empty.weight", False),
        ("model.layers", False),
    ],
)
def test_names(name, expected):
    assert is_prediction(name, DEEP) is expected


def test_what_a_section_says_of_them():
    config = {"mtp_num_hidden_layers": 1, "mtp_layer_types": ["full_attention"], "hidden_size": 8}
    assert prediction_entries(config) == {
        "mtp_num_hidden_layers": 1,
        "mtp_layer_types": ["full_attention"],
    }
