"""Pixels of families whose image processor transformers has on torchvision alone, against the real
one, in a process of its own that has torchvision."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import torchvision_worker
from support.images import picture
from support.played_torchvision import Played
from support.shards import ROOT
from support.tiny_gemma4_unified import GEMMA4_UNIFIED
from support.tiny_nemotron_omni import NEMOTRON_OMNI

from vlmpack.families.gemma4_unified import UnifiedImageRule
from vlmpack.families.nemotron_omni import OmniImageRule, OmniProcessor

FOLDER = ROOT / ".references"
WANTED = ROOT / "tests/support/reference_packages.txt"

SIZES = ((16, 16), (41, 300), (300, 41), (90, 200), (126, 180), (640, 480))
"""The fifth is what Gemma 4's rule makes of itself, so nothing is resized."""

OMNI, GEMMA = (dict(tiny.images or {}) for tiny in (NEMOTRON_OMNI, GEMMA4_UNIFIED))
CASES = (
    OMNI,
    {**OMNI, "max_num_patches": 0, "max_model_len": 60},
    {**OMNI, "resample": 2, "do_normalize": False},
    {**OMNI, "patch_size": 16, "min_num_patches": 1024, "max_num_patches": 13312},
    GEMMA,
    {**GEMMA, "patch_size": 16, "max_soft_tokens": 280},
)

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def images():
    return [picture(*size) for size in SIZES]


@pytest.fixture(scope="module")
def on_torchvision(tmp_path_factory, images):
    """Of each case, the features of each picture alone."""
    stamp = FOLDER / ".installed"
    if not stamp.exists() or stamp.read_text() != WANTED.read_text():
        pytest.skip("make references installs torchvision: .references has not this version of it")
    folder = tmp_path_factory.mktemp("torchvision")
    arrays = {str(n): torch.from_numpy(np.array(image)) for n, image in enumerate(images)}
    save_file(arrays, str(folder / "pictures.safetensors"))
    cases = [(case["image_processor_type"], case) for case in CASES]
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    subprocess.run(
        [sys.executable, torchvision_worker.__file__, str(FOLDER), str(folder)],
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    return [load_file(str(folder / f"{number}.safetensors")) for number in range(len(CASES))]


@pytest.mark.parametrize("number", range(4))
def test_nemotron_omni_makes_the_same_bits(on_torchvision, images, tmp_path, number):
    text = json.dumps(CASES[number])
    (tmp_path / "preprocessor_config.json").write_text(text, encoding="utf-8")
    ours = OmniProcessor.of_folder(tmp_path)
    rule = OmniImageRule(
        tmp_path, ours.patch_size, ours.min_num_patches, ours.max_num_patches, ours.max_model_len
    )
    grids = set()
    for key, image in enumerate(images):
        media, theirs = rule.preprocess([image]), on_torchvision[number]
        assert torch.equal(media.pixel_values, theirs[f"{key}.pixel_values"])
        assert [list(media.grid_thw[0][1:])] == theirs[f"{key}.image_grid_hw"].tolist()
        grids.add(media.grid_thw)
    assert len(grids) > 3


@pytest.mark.parametrize("number", [4, 5])
def test_gemma_4_unified_differs_in_resizing_alone(on_torchvision, images, tmp_path, number):
    """By one level of 255, where both round; a picture that is not resized is the same."""
    case, theirs = CASES[number], on_torchvision[number]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(case), encoding="utf-8")
    side, tokens = 3 * case["patch_size"], case["max_soft_tokens"]
    rule = UnifiedImageRule(tmp_path, patch=side, pool=1, tokens=tokens)
    kept = 0
    for key, image in enumerate(images):
        media = rule.preprocess([image])
        (count,) = media.num_tokens
        assert theirs[f"{key}.num_soft_tokens_per_image"].tolist() == [count]
        difference = (media.pixel_values - theirs[f"{key}.pixel_values"][0, :count]).abs()
        _, rows, columns = media.grid_thw[0]
        if image.size == (columns * side, rows * side):
            kept += 1
            assert not difference.any()
        assert float(difference.max()) < 1.01 / 255
    assert kept == (number == 4)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_one_that_is_played_makes_the_same(on_torchvision, images, number):
    """That of the suite's reference; bytes it resizes as Pillow does."""
    case, theirs = CASES[number], on_torchvision[number]
    for key, image in enumerate(images):
        features = Played(case["image_processor_type"], case)(images=[image], return_tensors="pt")
        for part, value in features.items():
            difference = (torch.as_tensor(value) - theirs[f"{key}.{part}"]).abs().max()
            assert float(difference) < (
                1.01 / 255 if number > 3 and part == "pixel_values" else 1e-9
            )
