"""The published sizes of hybrids: every name is accounted for, and what an image costs follows."""

from __future__ import annotations

import json
import math

import pytest
from support.published_hybrids import (
    NEMOTRON_3_NANO,
    QWEN3_5_0_8B,
    QWEN3_5_PROCESSOR,
    QWEN3_6_27B,
    QWEN3_6_27B_PARAMETERS,
    QWEN3_6_35B,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from vlmpack.backends.skeleton import model_skeleton
from vlmpack.capabilities.config import is_prediction
from vlmpack.capabilities.refused import refusal
from vlmpack.families.registry import family_of
from vlmpack.recipe.data import ImagesSection

SIZES = [(width, height) for width in (40, 300, 640, 1080, 5000) for height in (56, 480, 777, 4200)]


def skeleton(tmp_path, config):
    """(family, model without storage)."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert refusal(config) is None
    family = family_of(tmp_path)
    return family, model_skeleton(family.auto_class(), tmp_path)


def test_every_published_parameter_is_trained_or_kept(tmp_path):
    family, model = skeleton(tmp_path, QWEN3_6_27B)
    ours = {name: list(p.shape) for name, p in model.named_parameters()}
    kept = {name for name in QWEN3_6_27B_PARAMETERS if is_prediction(name, QWEN3_6_27B)}
    assert len(kept) == 15
    assert ours == {n: s for n, s in QWEN3_6_27B_PARAMETERS.items() if n not in kept}
    assert round(sum(map(math.prod, QWEN3_6_27B_PARAMETERS.values())) / 1e9, 1) == 27.8
    costs = family.cost_model(QWEN3_6_27B)
    assert costs.per_squared_length == 3 * 2 * 16 * 24 * 256
    # The weights of a token's matrix products, the recurrences' aside.
    matrices = sum(
        math.prod(shape) for name, shape in ours.items() if ".layers." in name and len(shape) == 2
    )
    recurrences = 48 * 48 * (3 * 64 * 128 + 3 * 128 * 128)
    assert costs.per_token == 3 * 2 * (matrices + recurrences)


@pytest.mark.parametrize("config", [QWEN3_6_27B, QWEN3_6_35B], ids=["27B", "35B-A3B"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_an_image_costs(tmp_path, size, config):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = json.dumps(QWEN3_5_PROCESSOR)
    (tmp_path / "preprocessor_config.json").write_text(text, encoding="utf-8")
    width, height = size
    rule = family_of(tmp_path).image_rule(tmp_path, ImagesSection())
    layout = rule.layout(width, height)
    rows, columns = smart_resize(height, width, factor=32, min_pixels=65536, max_pixels=16777216)
    assert layout.grid == (1, rows // 16, columns // 16)
    assert layout.num_tokens == rows * columns // 32**2 >= 64


@pytest.mark.parametrize(
    ("config", "billions", "attention"),
    [(QWEN3_5_0_8B, 0.9, 6 * 8 * 256), (NEMOTRON_3_NANO, 31.6, 6 * 32 * 128)],
    ids=["Qwen3.5-0.8B", "Nemotron-3-Nano"],
)
def test_published_sizes(tmp_path, config, billions, attention):
    family, model = skeleton(tmp_path, config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == billions
    assert family.cost_model(config).per_squared_length == 3 * 2 * attention
