"""Nemotron Omni's images: sizes, pixels and bounds are those of transformers' processor."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from support.families import tiny_family_folder
from support.images import file_of, one_image, picture
from support.played_torchvision import Played, module_of
from support.tiny_nemotron_omni import IMAGES, LEAST, MOST, PATCH

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.nemotron_omni import OmniImageRule, OmniProcessor
from vlmpack.recipe.data import ImagesSection

NAME = IMAGES["image_processor_type"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_family_folder("nemotron_h_omni", tmp_path_factory.mktemp("omni"))


@pytest.mark.parametrize("bounds", [(4, 64), (24, 200), (1024, 1024), (1024, 13312)])
def test_sizes_are_those_of_the_stock_rule(bounds):
    """1,000 of them, long ones and those that it cannot make a grid of too."""
    stock = module_of(NAME)["get_patch_grid_size"]
    draw, found = random.Random(0), set()
    least, most = bounds
    rule = OmniImageRule(Path(), patch=16, least=least, most=most, context=16384)
    sizes = [(1, 1), (16, 16), (48, 48), (17, 80), (1, 9000), (9000, 1), (512, 512)]
    while len(sizes) < 1000:
        sizes.append(tuple(round(2 ** draw.uniform(0, 13)) for _ in range(2)))
    for width, height in sizes:
        try:
            expected = stock(height, width, 16, 2, least, most)
        except ZeroDivisionError:
            expected = (0, 0)
        if 0 in expected:
            with pytest.raises(ValueError, match="This family's processor refuses it"):
                rule.layout(width, height)
            continue
        layout = rule.layout(width, height)
        assert layout.grid == (1, *expected), (width, height)
        assert layout.num_tokens == expected[0] * expected[1] // 4
        found.add(expected)
    assert len(found) > 10


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_patches": 0, "max_model_len": 60},
        {"max_num_patches": 0, "max_model_len": 12},
        {"resample": 2, "do_normalize": False},
        {"do_rescale": False, "image_mean": [100, 90, 80.5]},
    ],
    ids=str,
)
def test_pixels_are_the_stock_ones_whatever_the_settings(tmp_path, settings):
    """Bit for bit; how many images a sample has decides the second bound too."""
    values = {**IMAGES, **settings}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
    ours = OmniProcessor.of_folder(tmp_path)
    rule = OmniImageRule(
        tmp_path, PATCH, ours.min_num_patches, ours.max_num_patches, ours.max_model_len
    )
    grids = []
    for sizes in ([(200, 90)], [(16, 16), (64, 160), (300, 200)]):
        images = [picture(*size) for size in sizes]
        theirs = Played(NAME, values)(images=images, return_tensors="pt")
        media = rule.preprocess(images)
        assert torch.equal(media.pixel_values, theirs["pixel_values"])
        assert [list(grid[1:]) for grid in media.grid_thw] == theirs["image_grid_hw"].tolist()
        grids += media.grid_thw
    assert rule.grid(200, 90, 1) == grids[0][1:]


def test_levels_beyond_the_ends_are_kept(folder):
    """Bicubic overshoots: what a picture of bytes would have cut off is there."""
    rule = Encoder(folder).image_rule
    pixels = rule.preprocess([picture(30, 60)]).pixel_values
    settings = rule.processor
    low, high = (
        min((level - m) / s for m, s in zip(settings.image_mean, settings.image_std, strict=True))
        for level in (0.0, 1.0)
    )
    assert float(pixels.min()) < low or float(pixels.max()) > high


@pytest.mark.parametrize(
    ("budget", "bounds"),
    [
        ({"max_pixels": 100 * PATCH**2 + 5}, (LEAST, 100)),
        ({"min_pixels": 60 * PATCH**2 - 5}, (60, MOST)),
        ({"min_pixels": 10 * PATCH**2, "max_pixels": 12 * PATCH**2}, (10, 12)),
    ],
    ids=str,
)
def test_a_budget_is_kept_and_exported(folder, budget, bounds):
    rule = Encoder(folder).replace(budget=ImagesSection(**budget)).image_rule
    assert rule.settings() == dict(zip(("min_num_patches", "max_num_patches"), bounds, strict=True))
    stock = Played(NAME, {**IMAGES, **rule.settings()})
    for size in ((16, 16), (100, 300), (640, 480)):
        expected = stock(images=[picture(*size)], return_tensors="pt")["image_grid_hw"]
        assert list(rule.grid(*size)) == expected[0].tolist()


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"max_pixels": 4 * PATCH**2 - 1}, "less than the patches of one token, 16 x 16 = 256"),
        ({"max_pixels": 1280}, "is 20 patches, less than the 24 .* Set images.min_pixels too"),
        ({"min_pixels": 20000}, "is 313 patches, more than the 200 .* Set images.max_pixels too"),
        ({"max_tiles": 3}, "which has images.min_pixels and images.max_pixels"),
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_kept_is_refused(folder, budget, message):
    with pytest.raises(CapabilityError, match=message):
        Encoder(folder).replace(budget=ImagesSection(**budget)).image_rule  # noqa: B018


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_processor_type": "InternVLImageProcessor"}, "it is a InternVLImageProcessor"),
        ({"patch_size": 16}, r"are \(16, 0.5\), but those of the model are \(8, 0.5\)"),
        ({"downsample_ratio": 0.25}, "downsample_ratio is 0.25, expected 0.5"),
        ({"resample": 1}, "resample is 1, expected 2 or 3"),
        ({"norm_std": [1, 2]}, r"image_std is \[1, 2\], expected a list of three numbers"),
        ({"min_num_patches": "24"}, "min_num_patches is '24', expected int"),
    ],
    ids=str,
)
def test_another_processor_is_refused(folder, tmp_path, values, message):
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps({**IMAGES, **values}), encoding="utf-8")
    with pytest.raises(Exception, match=message):
        Encoder(tmp_path / "model").encode(one_image(file_of(picture(64, 64))))


def test_a_section_of_processor_config_goes_first(folder, tmp_path):
    """As transformers has it."""
    shutil.copytree(folder, tmp_path / "model")
    section = {"image_processor": {**IMAGES, "max_num_patches": 40}}
    path = tmp_path / "model" / "processor_config.json"
    path.write_text(json.dumps(section), encoding="utf-8")
    assert Encoder(tmp_path / "model").image_rule.most == 40


def test_pictures_are_what_was_shown(folder):
    rule = Encoder(folder).image_rule
    original = picture(96, 64)
    (shown,) = rule.pictures(rule.preprocess([original]))
    assert shown.size == (96, 64)
    assert shown.tobytes() == original.tobytes()
    assert rule.smallest().num_tokens == (1,)
    assert not rule.smallest().pixel_values.any()
