"""The published sizes of Nemotron 3 Nano Omni: what is trained, what an image costs, and what its
files must say first."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.played_torchvision import module_of
from support.published_omni import NEMOTRON_3_NANO_OMNI, OF_ITS_OWN, PROCESSOR

from vlmpack.backends.policy import component_of, is_untouched
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.capabilities.refused import refusal
from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of
from vlmpack.recipe.data import ImagesSection

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
