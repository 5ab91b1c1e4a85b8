"""What Nemotron-H has of its own: layers of four kinds, and weights that kernels read alone."""

from __future__ import annotations

import json
import shutil

import pytest
from support.engines import make_engine, policy
from support.families import tiny_family_folder
from support.runs import pack, run_batch
from support.shards import text_samples

from vlmpack.backends.hf.adapters import adapter_targets
from vlmpack.backends.hf.load import load_model
from vlmpack.capabilities.refused import refusal
from vlmpack.encode import Encoder
from vlmpack.families import text_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model folder."""
    return tiny_family_folder("nemotron_h", tmp_path_factory.mktemp("nemotron_h"))


def test_every_expert_is_used_and_the_bias_of_their_choice_stays(folder):
    encoder = Encoder(folder)
    vlm = make_engine(folder, encoder).vlm.train()
    batch = pack([encoder.encode(sample.cooked()) for sample in text_samples()])
    gradients = run_batch(vlm, batch).gradients
    experts = gradients["model.layers.3.mixer.experts.down_proj"]
    assert [bool(one.any()) for one in experts] == [True] * 4
    assert not any("e_score_correction_bias" in name for name in gradients)
    assert any("e_score_correction_bias" in name for name in vlm.model.state_dict())


@pytest.mark.parametrize("least", [None, 0.0])
def test_the_class_bounds_steps_by_a_key_that_servers_do_not_read(folder, tmp_path, least):
    """As docs/recurrence.md has it of transformers; where this fails, it was mended there."""
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    assert config["time_step_limit"][0] == 0.0 and config["time_step_min"] == 0.001
    if least is not None:
        (copy / "config.json").write_text(json.dumps(config | {"time_step_min": least}))
    bounds = {
        module.time_step_limit
        for module in load_model(copy).modules()
        if hasattr(module, "time_step_limit")
    }
    assert bounds == {(0.001 if least is None else least, float("inf"))}


def test_no_adapter_stands_where_a_kernel_reads_the_weight_alone(folder, tmp_path):
    wanted = policy(language="lora")
    names = adapter_targets(load_model(folder), text_lm.NEMOTRON_H.modules, wanted)
    assert "model.layers.0.mixer.in_proj" in names
    assert not any(name.endswith("out_proj") for name in names)
    delta = load_model(tiny_family_folder("qwen3_5_text", tmp_path))
    names = adapter_targets(delta, text_lm.QWEN3_5_TEXT.modules, wanted)
    assert "model.layers.0.linear_attn.out_proj" in names


@pytest.mark.parametrize(
    "layers",
    [
        {"hybrid_override_pattern": "MEM*-"},
        {"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"]},
        {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
    ],
    ids=["a pattern", "names as published", "names as saved"],
)
def test_layers_as_they_are_published(folder, layers):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["layers_block_type"]
    assert refusal({**config, **layers}) is None
    costs = text_lm.NEMOTRON_H.cost_model({**config, **layers})
    assert costs.per_squared_length == 3 * 2 * 4 * 24, "one layer with attention"
    assert costs.per_token > 0


def test_a_kind_of_layer_that_nobody_tested_is_refused(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["layers_block_type"] = ["linear_attention", "conv"]
    assert "of kind conv" in (refusal(config) or "")
