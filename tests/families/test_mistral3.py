"""The decoders behind Pixtral's tower, and what they cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support.engines import make_engine
from support.families import tiny_family_folder, write_tiny
from support.runs import find_differences, pack, run_batch
from support.stock import StockProcessor, load_stock, run_one_by_one
from support.tiny_pixtral import MISTRAL3, decoder, mistral3

from vlmpack.encode import Encoder
from vlmpack.families.registry import family_of


def test_a_sliding_window_ends_with_its_sample(tmp_path, mixed):
    """The window of the tiny Mistral 3 is shorter than its samples; without it they differ."""
    folder = tiny_family_folder("mistral3", tmp_path)
    encoder, processor = Encoder(folder), StockProcessor(folder)
    reference = run_one_by_one(load_stock(folder), {s.key: processor(s) for s in mixed})
    batch = pack([encoder.encode(sample.cooked()) for sample in mixed], alignment=8)
    vlm = make_engine(folder, encoder).vlm
    assert find_differences(run_batch(vlm, batch), reference) == []
    assert vlm.language.config.sliding_window < min(batch.lengths[0], batch.lengths[2])
    for layer in vlm.language.layers:
        layer.self_attn.config.sliding_window = None
    assert any(
        line.startswith("loss") for line in find_differences(run_batch(vlm, batch), reference)
    )


@pytest.mark.slow
def test_ministral_3_scales_by_positions_in_the_sample(tmp_path, mixed):
    """Its queries are scaled by their position, from the 16th token on in this one."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 256.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.5,
    }
    tiny = replace(MISTRAL3, config=lambda: mistral3(decoder("ministral3", rope_parameters=rope)))
    write_tiny(tiny, tmp_path)
    encoder, processor = Encoder(tmp_path), StockProcessor(tmp_path)
    reference = run_one_by_one(load_stock(tmp_path), {s.key: processor(s) for s in mixed})
    batch = pack([encoder.encode(sample.cooked()) for sample in mixed], alignment=8)
    vlm = make_engine(tmp_path, encoder).vlm
    assert find_differences(run_batch(vlm, batch), reference) == []
    whole_row = replace(batch, position_ids=torch.arange(batch.num_slots)[None, None])
    assert any("loss" in line for line in find_differences(run_batch(vlm, whole_row), reference))


def test_the_cost_of_pixtral_12b(tmp_path):
    """Its published config.json names neither heads nor the tower's sizes."""
    config = {
        "model_type": "llava",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "model_type": "mistral",
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "vocab_size": 131072,
        },
        "vision_config": {"image_size": 1024, "model_type": "pixtral", "patch_size": 16},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = family_of(tmp_path).cost_model(config)
    assert (model.per_token + model.per_label_token) / 6 == pytest.approx(11.58e9, rel=0.01)
    tower_and_projector = 24 * 4 * 4 * 1024**2 + 1024 * 3 * 256 + 1024 * 5120 + 5120**2
    assert model.per_patch / 6 == pytest.approx(tower_and_projector, rel=0.01)
