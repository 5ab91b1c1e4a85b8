"""Gemma 4's images: sizes and tokens are those of transformers' processor, whatever the budget."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from support.families import tiny_family_folder
from support.images import file_of, one_image, picture
from support.published_gemma4 import CONFIGS, IMAGE_TOKENS, PROCESSOR
from support.tiny_gemma4 import MAX_TOKENS, PATCH, POOL
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.gemma4 import (
    END,
    SOFT,
    SOFT_TOKENS,
    START,
    Gemma4ImageRule,
    padded_patches,
)
from vlmpack.families.registry import family_of
from vlmpack.recipe.data import ImagesSection

AREA = (PATCH * POOL) ** 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_family_folder("gemma4-dense", tmp_path_factory.mktemp("gemma4"))


def published(tmp_path, name="26B-A4B"):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    (tmp_path / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return tmp_path


@pytest.mark.parametrize("budget", SOFT_TOKENS)
def test_sizes_are_those_of_the_stock_rule(tmp_path, budget):
    """2,000 of them, long ones and those that it refuses too."""
    draw = random.Random(budget)
    rule = Gemma4ImageRule(tmp_path, patch=16, pool=3, tokens=budget)
    sizes = [(1, 1), (1, 5000), (5000, 1), (7, 20000), (48, 48), (672, 960), (960, 672)]
    while len(sizes) < 2000:
        sizes.append(tuple(round(2 ** draw.uniform(0, 13)) for _ in range(2)))
    refused, found = 0, set()
    for width, height in sizes:
        try:
            expected = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="This family's processor refuses it"):
                rule.layout(width, height)
            continue
        layout = rule.layout(width, height)
        assert tuple(16 * edge for edge in layout.grid[1:]) == expected, (width, height)
        assert layout.runs == (expected[0] * expected[1] // 48**2,)
        assert layout.num_tokens <= budget
        found.add(layout.num_tokens)
    assert len(found) > 25
    assert refused < 100


def test_the_published_files_make_the_published_rule(tmp_path):
    rule = family_of(published(tmp_path)).image_rule(tmp_path, ImagesSection())
    assert (rule.patch, rule.pool, rule.tokens, rule.blocks) == (16, 3, 280, True)
    assert tuple(IMAGE_TOKENS.values()) == (START, SOFT, END)
    for size in [(640, 480), (1920, 1080), (224, 224), (480, 640), (3000, 200)]:
        media = rule.preprocess([picture(*size)])
        layout = rule.layout(*size)
        assert media.grid_thw == (layout.grid,)
        assert media.blocks == (layout.runs,)
        assert media.pixel_values.shape == (layout.grid[1] * layout.grid[2], 3 * 16**2)
        assert layout.text == "<|image>" + "<|image|>" + "<image|>"


@pytest.mark.parametrize("name", CONFIGS)
def test_what_an_image_costs(tmp_path, name):
    """20 sizes, by the published files."""
    rule = family_of(published(tmp_path, name)).image_rule(tmp_path, ImagesSection())
    sizes = [(w, h) for w in (40, 300, 640, 1080, 5000) for h in (56, 480, 777, 4200)]
    costs = set()
    for width, height in sizes:
        rows, columns = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
        layout = rule.layout(width, height)
        assert layout.grid == (1, rows // 16, columns // 16)
        assert layout.num_tokens == rows * columns // 48**2 <= 280
        costs.add(layout.num_tokens)
    assert len(costs) > 8


@pytest.mark.parametrize(
    ("name", "blocks"), [("E2B", False), ("E4B", False), ("31B", True), ("26B-A4B", True)]
)
def test_the_large_ones_alone_have_blocks(tmp_path, name, blocks):
    family = family_of(published(tmp_path, name))
    assert family.modules.image_blocks == blocks
    assert family.image_rule(tmp_path, ImagesSection()).blocks == blocks
    assert family.largest_head == 512


def test_a_budget_in_pixels_is_the_largest_of_the_processors_within_it(folder, tmp_path):
    for tokens, more in ((70, 0), (140, 1), (1120, 10**6)):
        budget = ImagesSection(max_pixels=tokens * AREA + more)
        if tokens == 1120:
            with pytest.raises(ValueError, match=r"3360 patches long, .* 256 .position_embedding"):
                family_of(folder).image_rule(folder, budget)
            continue
        encoder = Encoder(folder).replace(budget=budget)
        if tokens == 70:
            assert encoder.image_rule.tokens == 70
            exported = tmp_path / "export"
            shutil.copytree(folder, exported)
            encoder.write_settings(exported)
            assert Encoder(exported).image_rule.tokens == 70
    with pytest.raises(CapabilityError, match=r"images\.max_pixels: 100 is less than 70 tokens"):
        family_of(folder).image_rule(folder, ImagesSection(max_pixels=100))


def test_a_smaller_budget_is_exported_and_counted_exactly(tmp_path):
    rule = family_of(published(tmp_path)).image_rule(tmp_path, ImagesSection(max_pixels=400_000))
    assert rule.tokens == 140
    assert rule.settings() == {"max_soft_tokens": 140}
    for size in [(640, 480), (100, 900)]:
        media, layout = rule.preprocess([picture(*size)]), rule.layout(*size)
        assert media.pixel_values.shape[0] == layout.grid[1] * layout.grid[2]
        assert layout.num_tokens <= 140
        assert layout.grid[1] * layout.grid[2] * 16**2 <= 400_000


def test_images_are_padded_to_the_largest_and_their_places_are_the_stock_ones(folder):
    rule = Encoder(folder).image_rule
    media = rule.preprocess([picture(120, 40), picture(50, 60)])
    pixels, places = padded_patches(media)
    stock = rule.processor(images=[picture(120, 40), picture(50, 60)], return_tensors="pt")
    counts = [h * w for _, h, w in media.grid_thw]
    assert pixels.shape[1] == places.shape[1] == max(counts) < stock["pixel_values"].shape[1]
    assert torch.equal(pixels, stock["pixel_values"][:, : max(counts)])
    assert torch.equal(places, stock["image_position_ids"][:, : max(counts)])
    assert (stock["image_position_ids"][:, max(counts) :] == -1).all()


def test_padding_that_the_tower_saw_would_be_found(folder):
    """Images beside a larger one keep their features."""
    encoder = Encoder(folder)
    from support.engines import make_engine

    vlm = make_engine(folder, encoder).vlm
    rule = encoder.image_rule
    images = [picture(120, 40), picture(50, 60)]
    with torch.no_grad():
        both = vlm.image_features(rule.preprocess(images), torch.device("cpu")).features
        alone = [
            vlm.image_features(rule.preprocess([one]), torch.device("cpu")).features
            for one in images
        ]
    assert len({part.shape[0] for part in alone}) == 2, "none was padded"
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_pictures_are_what_was_shown(folder):
    rule = Encoder(folder).image_rule
    original = picture(120, 40)
    (shown,) = rule.pictures(rule.preprocess([original]))
    resized = original.resize(shown.size, 3)
    assert shown.size[0] * shown.size[1] <= MAX_TOKENS * AREA
    difference = [abs(a - b) for a, b in zip(shown.tobytes(), resized.tobytes(), strict=True)]
    assert max(difference) <= 1


def test_a_blank_image_is_one_token(folder):
    rule = Encoder(folder).image_rule
    blank = rule.smallest()
    assert blank.num_tokens == (1,)
    assert blank.blocks == ((1,),)
    assert not blank.pixel_values.any()


def test_a_processor_that_makes_other_patches_than_the_tower_takes_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": 8}))
    with pytest.raises(Exception, match=r"are \(8, 3\), but those of the tower are \(6, 3\)"):
        Encoder(tmp_path / "model").encode(one_image(file_of(picture(64, 64))))
