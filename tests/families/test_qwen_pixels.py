"""Patches of the Qwen line's images against transformers' own processor, bit for bit."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.families import qwen_vl
from vlmpack.packing.media import joined_rows

SIZES = ((28, 28), (57, 31), (90, 60), (300, 200), (13, 500), (640, 480))
SETTINGS = {
    "as published": {},
    "bilinear": {"resample": 2},
    "another factor": {"rescale_factor": 1 / 127.5},
    "not rescaled": {"do_rescale": False},
    "not normalised": {"do_normalize": False},
    "neither": {"do_rescale": False, "do_normalize": False},
    "grey mean": {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}


def picture(width, height):
    """Every level of every channel, where there is room."""
    draw = np.random.default_rng(width)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(params=SETTINGS)
def rule(request, tmp_path):
    folder = shutil.copytree(TINY_MODEL, tmp_path / "model")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SETTINGS[request.param]))
    return Encoder(folder).image_rule


def test_patches_are_the_processors_own(rule):
    images = [picture(*size) for size in SIZES]
    ours, stock = rule.preprocess(images), rule.processor(images=images, return_tensors="pt")
    assert ours.grid_thw == tuple(map(tuple, stock["image_grid_thw"].tolist()))
    found, wanted = ours.pixel_values, stock["pixel_values"]
    assert found.dtype is wanted.dtype is torch.float32 and len(found.unique()) > 100
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(joined_rows([rule.preprocess([i]).pixel_values for i in images]), found)


@pytest.mark.parametrize("fault", ["level", "order", "channels"])
def test_another_order_or_level_is_seen(fault, monkeypatch):
    """Control."""
    rule = Encoder(TINY_MODEL).image_rule
    image = picture(90, 60)
    stock = rule.processor(images=[image], return_tensors="pt")["pixel_values"]
    write, values = qwen_vl.QwenImageRule._write_patches, rule.level_values
    wrong = {
        "level": (write, np.roll(values, 1, axis=1)),
        "order": (lambda own, levels, rows: write(own, levels[::-1], rows), values),
        "channels": (write, values[::-1]),
    }
    changed, table = wrong[fault]
    monkeypatch.setattr(qwen_vl.QwenImageRule, "_write_patches", changed)
    monkeypatch.setitem(rule.__dict__, "level_values", table)
    assert (rule.preprocess([image]).pixel_values - stock).abs().max() > 0.01
