"""What a recipe says of pixels is what its encoder does; packs of another budget are refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recipes import run_settings, small_settings

from vlmpack.build.data import build_encoder
from vlmpack.data.packs.manifest import encoder_differences
from vlmpack.encode import Encoder
from vlmpack.errors import RecipeError, RunIdentityError
from vlmpack.recipe import load_recipe
from vlmpack.recipe.data import ImagesSection


@pytest.fixture
def build(tmp_path):
    settings = small_settings(tmp_path)
    return lambda **images: build_encoder(load_recipe(settings | {"images": images}))


def test_what_is_set_reaches_the_encoder_and_nothing_else(build):
    assert build().settings.budget == build(min_pixels=None).settings.budget == ImagesSection()
    assert build(max_pixels=20_000).settings.budget == ImagesSection(max_pixels=20_000)
    plain, bound = build(), build(max_pixels=20_000)
    assert bound.image_rule.min_pixels == plain.image_rule.min_pixels
    assert (
        bound.image_rule.layout(900, 900).num_tokens
        < 26
        < 900
        < (plain.image_rule.layout(900, 900).num_tokens)
    )


def test_a_knob_of_other_families_is_refused_before_any_data(build):
    with pytest.raises(RecipeError, match=r"images\.max_tiles: 2.*has images.min_pixels and"):
        build(max_tiles=2)


def test_an_image_longer_than_a_sample_is_noted(build, caplog):
    with caplog.at_level(logging.WARNING, "vlmpack"):
        build(max_pixels=400_000)
        assert caplog.text == ""
        build(max_pixels=600_000)
    assert "takes up to 7" in caplog.text
    assert "images.max_pixels: 600000, more than training.seq_length 512" in caplog.text
    assert "data.over_long: error decides" in caplog.text


def test_packs_of_another_budget_are_refused_by_name(build):
    plain, bound = build(), build(max_pixels=20_000)
    made: Any = SimpleNamespace(kind="plan", encoder=dict(bound.fingerprint_parts))
    assert encoder_differences(made, bound) == []
    assert encoder_differences(made, plain) == [
        "images: max_pixels 20000 in the packs, not set now"
    ]
    older: Any = SimpleNamespace(kind="plan", encoder=dict(plain.fingerprint_parts))
    assert encoder_differences(older, plain) == []
    assert encoder_differences(older, bound) == [
        "images: not set in the packs, max_pixels 20000 now"
    ]


@pytest.mark.slow
def test_a_run_shows_its_first_sample_and_its_model_resizes_as_it_did(tmp_path, capsys):
    from vlmpack.api import run_recipe

    shown = {"progress": "plain", "trackers": []}
    settings = run_settings(tmp_path, training__max_steps=2) | {"export": {}, "logging": shown}
    recipe = load_recipe(settings | {"images": {"max_pixels": 9_000}})
    result = run_recipe(recipe)
    text = (result.run_dir / "first-sample.txt").read_text(encoding="utf-8")
    assert re.search(r"learnt \d+ of \d+ tokens", text)
    assert "[[" in text
    assert "[[" in capsys.readouterr().err
    exported, trained = Encoder(result.export), build_encoder(recipe)
    stock = Encoder(Path(recipe.model.path))
    sizes = [(300, 60), (40, 30), (900, 900)]
    assert exported.layouts(sizes) == trained.layouts(sizes) != stock.layouts(sizes)
    with pytest.raises(RunIdentityError, match=r"images\.max_pixels: 9000 in the run folder, miss"):
        run_recipe(load_recipe(settings))
