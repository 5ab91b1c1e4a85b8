"""The cost model: its sums, and its coefficients against counted weights and published figures."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.families import FAMILIES, tiny_family_folder
from support.hybrids import replaced_kernels
from support.images import picture

from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.families import flops
from vlmpack.families.registry import family_of
from vlmpack.packing import CostModel, Media
from vlmpack.recurrence import RowSegments, choose_recurrence, delta_rule, scan

MODEL = CostModel(
    per_token=10.0,
    per_squared_length=2.0,
    per_label_token=3.0,
    per_patch=5.0,
    per_squared_patches=0.5,
    image_patches=4,
)


def column(*values):
    return np.array(values)


def test_costs_of_language_and_vision():
    tokens, squares, patches = column(6, 3), column(20, 9), column(8, 0)
    costs = MODEL(tokens, squares, patches)
    assert costs.dtype == np.float64
    assert costs.tolist() == [[100.0, 40.0 + 16.0], [48.0, 0.0]]
    exact = MODEL(tokens, squares, patches, patch_squares=column(40, 0), labels=column(2, 1))
    assert exact.tolist() == [[106.0, 60.0], [51.0, 0.0]]


def test_a_pack_costs_what_its_samples_do():
    random = np.random.default_rng(0)
    tokens, patches = random.integers(1, 5000, 40), random.integers(0, 4000, 40)
    samples = MODEL(tokens, tokens**2, patches, patch_squares=patches**2)
    whole = [np.array([total.sum()]) for total in (tokens, tokens**2, patches)]
    pack = MODEL(*whole, patch_squares=np.array([(patches**2).sum()]))
    assert samples.sum(axis=0) == pytest.approx(pack[0])
    assert samples.sum() > 0


def shown(rule, *, any_grid):
    """Images by name: one of 8 x 16 patches and two of 8 x 8, or of 12 where tokens are of 3 x 3;
    of families that cut images into tiles, an image as it is cut."""
    if not any_grid:
        return {"one image": rule.preprocess([picture(120, 60)])}
    smallest = rule.smallest()
    per_token = smallest.pixel_values.shape[0] // sum(smallest.num_tokens)
    side = 12 if per_token == 9 else 8
    pixels = torch.randn(2 * side**2, smallest.pixel_values.shape[1])
    return {
        name: Media(
            pixel_values=pixels,
            grid_thw=grids,
            num_tokens=tuple(t * h * w // per_token for t, h, w in grids),
        )
        for name, grids in (
            ("one image", ((1, side, 2 * side),)),
            ("two images", ((1, side, side),) * 2),
        )
    }


def counted(folder, monkeypatch, *, any_grid):
    """FLOPs that torch counts in one forward pass: of the decoder for 64 tokens, of the head for
    one, of the tower and the projector for some images; and those images."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    family = family_of(folder)
    # torch counts no grouped matmuls.
    model = family.auto_class().from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.float().eval()
    language = model.get_submodule(family.modules.language)
    width = language.config.hidden_size

    def measure(run):
        # torch counts the matmuls of attention, not its fused kernels for CPU.
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            run()
        return counter.get_total_flops()

    embeds, ids = torch.randn(1, 64, width), torch.zeros(1, 64, dtype=torch.int64)
    others = family.decoder_arguments(model, ids, ids[0, :0])
    others["row_segments"] = RowSegments((64,), torch.tensor([0, 64]))
    # transformers' own torch form of Mamba-2 has no matmuls to be counted. On a CPU chunks are 32.
    monkeypatch.setattr(delta_rule, "chunk_size", lambda device: flops.CHUNK)
    monkeypatch.setattr(scan, "chunk_size", lambda device: flops.CHUNK)
    ours = choose_recurrence("torch", device=torch.device("cpu"), dtype=torch.float32)
    with replaced_kernels(language, ours):
        decoder = measure(lambda: language(inputs_embeds=embeds, use_cache=False, **others))
    figures = {
        "decoder": decoder,
        "head": measure(lambda: family.modules.head_of(model)(embeds[0, :1])),
    }
    images = {}
    if family.modules.vision is not None:
        images = shown(Encoder(folder).image_rule, any_grid=any_grid)
    for name, media in images.items():
        figures[name] = measure(lambda media=media: family.image_features(model, media))
    return figures, images


def without_prefix(folder):
    """Nemotron Omni's cost leaves class and register tokens out: ten beside a thousand patches, but
    not beside the few of a test."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if "num_registers" in config.get("vision_config", {}):
        config["vision_config"] |= {"num_cls_tokens": 0, "num_registers": 0}
        file.write_text(json.dumps(config))


@pytest.mark.cases(slow=("qwen2_5_vl", "gemma4", "nemotron_h", "internvl", "deepseek_v3"))
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen2_5_vl", "qwen3_vl") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_coefficients_are_what_torch_counts(name, tmp_path, monkeypatch):
    folder = tiny_family_folder(name, tmp_path)
    without_prefix(folder)
    model = family_of(folder).cost_model(json.loads((folder / "config.json").read_text()))
    flops, shown_images = counted(folder, monkeypatch, any_grid=model.per_squared_patches > 0)
    # torch counts every pair of positions; half of them are masked in causal attention.
    assert flops["decoder"] == pytest.approx(
        (model.per_token * 64 + 2 * model.per_squared_length * 64**2) / 3, rel=1e-9
    )
    assert flops["head"] == pytest.approx(model.per_label_token / 3, rel=1e-9)
    assert ("one image" in flops) == (model.per_patch > 0)
    ones = column(1)
    for name, media in shown_images.items():
        patches = [t * h * w for t, h, w in media.grid_thw]
        squares = sum(count**2 for count in patches)
        vision = model(ones, ones, column(sum(patches)), patch_squares=column(squares))[0, 1]
        assert flops[name] == pytest.approx(vision / 3, rel=1e-9)
    if "two images" in flops:
        assert flops["one image"] > flops["two images"], "whole images attend"


PUBLISHED_3B = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
"""Qwen2.5-VL-3B as it is published: the decoder's sizes at the top."""


def model_of(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return family_of(tmp_path).cost_model(config)


def test_the_published_3b_model(tmp_path):
    """18.5 GFLOPs for a text token, its head included, and 15.4 more for a vision token."""
    model = model_of(PUBLISHED_3B, tmp_path)
    assert (model.per_token + model.per_label_token) / 1e9 == pytest.approx(18.5, rel=0.01)
    assert 4 * model.per_patch / 1e9 == pytest.approx(15.4, rel=0.01)
    assert model.per_squared_length == 3 * 2 * 36 * 16 * 128
    assert model.per_squared_patches == 3 * 4 * 1280 * 4


def test_a_missing_size_is_named(tmp_path):
    config = {key: value for key, value in PUBLISHED_3B.items() if key != "intermediate_size"}
    with pytest.raises(ModelError, match="intermediate_size is None in the part of model_type"):
        model_of(config, tmp_path)
    with pytest.raises(ModelError, match="vision_config is None, expected an object"):
        model_of({**PUBLISHED_3B, "vision_config": None}, tmp_path)


def test_planning_needs_no_torch():
    code = (
        "import sys; from vlmpack.packing import CostModel, StreamPacker, balance, plan_packs;"
        "plan_packs([3, 4], 8, second=[1, 0], second_budget=2); StreamPacker(8).push(3);"
        "balance([1.0, 2.0], 2); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_every_public_name_of_packing_resolves():
    from vlmpack import packing

    assert [name for name in packing.__all__ if not hasattr(packing, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'plan_pack'"):
        _ = packing.plan_pack
