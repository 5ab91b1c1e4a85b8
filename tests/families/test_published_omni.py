"""The published sizes of Nemotron 3 Nano Omni: what is trained, what an image costs, and what its
files must say first.

What is published of Nemotron 3 Nano Omni: sizes and settings; no weights.

Read 2026-11-22 in public readers of its config.json (ollama's and vLLM's tests of their converters
and counters of image tokens, which agree where they overlap; none notes a revision), in the names
that transformers 5.23 maps, and in its model card (31B parameters, 23 Mamba-2, 23 mixtures and 6
attention layers). Its language model is Nemotron 3 Nano. What RadioConfig has as its defaults
(C-RADIOv4-H) is not repeated. Not found: the list of parameter names, and whether its vision_config
says more than this.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from support.played_torchvision import module_of
from support.published_hybrids import NEMOTRON_3_NANO

from vlmpack.backends.policy import component_of, is_untouched
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.capabilities.refused import refusal
from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of
from vlmpack.recipe.data import ImagesSection

OF_ITS_OWN = "NemotronH_Nano_Omni_Reasoning_V3"
"""The `model_type` that it was published with, whose code lies beside it."""

NEMOTRON_3_NANO_OMNI: dict[str, Any] = {
    "architectures": ["NemotronH_Omni_Reasoning_V3"],
    "model_type": "nemotron_h_omni",
    "force_image_size": 512,
    "downsample_ratio": 0.5,
    "img_context_token_id": 18,
    "sound_context_token_id": 27,
    "vit_hidden_size": 1280,
    "projector_hidden_size": 20480,
    "vision_config": {"model_type": "radio", "patch_size": 16, "video_temporal_patch_size": 2},
    "sound_config": {
        "model_type": "parakeet_encoder",
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "intermediate_size": 4096,
        "conv_kernel_size": 9,
        "subsampling_conv_channels": 256,
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
        "subsampling_factor": 8,
        "num_mel_bins": 128,
        "projection_hidden_size": 4096,
        "projection_bias": False,
    },
    "llm_config": NEMOTRON_3_NANO,
}
"""With the names of classes that transformers has; as published `sound_config` says `parakeet`."""

PROCESSOR: dict[str, Any] = {
    "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
    "patch_size": 16,
    "downsample_ratio": 0.5,
    "min_num_patches": 1024,
    "max_num_patches": 13312,
    "norm_mean": [0.48145466, 0.4578275, 0.40821073],
    "norm_std": [0.26862954, 0.26130258, 0.27577711],
}


SIZES = [(width, height) for width in (40, 300, 640, 1080, 5000) for height in (56, 480, 777, 4200)]


def folder_of(tmp_path, **others):
    """A model folder with its files."""
    config = {**NEMOTRON_3_NANO_OMNI, **others}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return tmp_path


def test_published_sizes(tmp_path):
    folder = folder_of(tmp_path)
    assert refusal(NEMOTRON_3_NANO_OMNI) is None
    family = family_of(folder)
    model, counts = model_skeleton(family.auto_class(), folder), Counter()
    for name, parameter in model.named_parameters():
        reached = not is_untouched(name, family.modules)
        counts[component_of(name, family.modules) if reached else "stays"] += parameter.numel()
    assert round(sum(counts.values()) / 1e9, 1) == 33.0, "as the hub counts its files"
    assert round(counts["language"] / 1e9, 1) == 31.6, "as Nemotron 3 Nano"
    assert round(counts["vision"] / 1e6) == 652
    assert counts["projector"] == 5120 * (20480 + 1) + 20480 * 2688
    assert counts["stays"] > 600e6, "the tower for sounds"
    assert family.cost_model(NEMOTRON_3_NANO_OMNI).per_squared_length == 3 * 2 * 6 * 32 * 128


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_an_image_costs(tmp_path, size):
    rule = family_of(folder_of(tmp_path)).image_rule(tmp_path, ImagesSection())
    width, height = size
    stock = module_of(PROCESSOR["image_processor_type"])["get_patch_grid_size"]
    rows, columns = stock(height, width, 16, 2, 1024, 13312)
    layout = rule.layout(width, height)
    assert layout.grid == (1, rows, columns)
    assert layout.num_tokens == rows * columns // 4 >= 250


def test_names_of_classes_that_transformers_does_not_have(tmp_path):
    """Both are refused, as docs/families.md says; the first is told which name there is."""
    said = refusal({**NEMOTRON_3_NANO_OMNI, "model_type": OF_ITS_OWN}) or ""
    assert "did you mean 'nemotron_h_omni'?" in said
    sounds = {**NEMOTRON_3_NANO_OMNI["sound_config"], "model_type": "parakeet"}
    folder = folder_of(tmp_path, sound_config=sounds)
    with pytest.raises(ModelError, match="parakeet"):
        model_skeleton(family_of(folder).auto_class(), folder)
