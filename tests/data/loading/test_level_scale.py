"""`data.pixels: levels`: which models' pixels can travel so, and a run that learns the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import stored_tensors
from support.families import VISION_FAMILIES, tiny_family_folder
from support.images import picture
from support.recipes import changed, rows, run_settings

from vlmpack.api import resolve, run_recipe
from vlmpack.data.loading import loader
from vlmpack.data.loading.loader import level_scale
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.packing import Media
from vlmpack.packing.media import pixels_of

REFUSED = {"nemotron_h_omni"}
"""Its processor resizes in float32."""
SIZES = [(48, 32), (200, 31), (64, 64), (31, 97), (640, 480)]


@pytest.mark.cases(quick=("qwen2_5_vl", "qwen3_vl", "nemotron_h_omni"), slow=("internvl", "gemma3"))
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_pixels_of_a_family_are_given_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    encoder = Encoder(tiny_family_folder(name, tmp_path))
    if name in REFUSED:
        with pytest.raises(
            CapabilityError, match=r"between two levels; set data\.pixels to float32"
        ):
            level_scale(encoder)
        return
    scale = level_scale(encoder)
    for seed, size in enumerate(SIZES):
        pixels = encoder.image_rule.preprocess([picture(*size, seed=seed)]).pixel_values
        found = scale.levels_of(pixels)
        assert found is not None, size
        assert found[0].numel() * 4 == pixels.numel() * pixels.element_size()
        media = Media(pixel_values=found[0], grid_thw=(), num_tokens=(), table=found[1])
        given = pixels_of(media, torch.float32)
        assert torch.equal(given.view(torch.int32), pixels.view(torch.int32)), size


@pytest.mark.soak
def test_a_run_learns_the_same_bit_for_bit(tmp_path: Path, monkeypatch: Any) -> None:
    sent: list[torch.dtype] = []
    as_levels = loader.as_levels

    def recorded(*given: Any) -> Any:
        batch = as_levels(*given)
        if batch.media is not None:
            sent.append(batch.media.pixel_values.dtype)
        return batch

    monkeypatch.setattr(loader, "as_levels", recorded)
    common = run_settings(tmp_path, training__max_steps=4, data__num_workers=0)
    found = []
    for kind in ("float32", "levels"):
        run_dir = tmp_path / kind
        run_recipe(resolve(changed(common, data__pixels=kind, run_dir=str(run_dir)), {}))
        (last,) = run_dir.glob("checkpoints/step-00000004")
        found.append((rows(run_dir, "step", "loss", "grad_norm"), stored_tensors(last)))
    assert sent
    assert set(sent) == {torch.uint8}
    (losses, weights), (levels_losses, levels_weights) = found
    assert len(losses) == 4
    assert losses == levels_losses
    assert weights.keys() == levels_weights.keys()
    assert all(torch.equal(weights[name], levels_weights[name]) for name in weights)


@pytest.mark.slow
def test_a_model_whose_pixels_are_no_levels_is_refused_before_data_is_read(tmp_path: Path) -> None:
    folder = tiny_family_folder("nemotron_h_omni", tmp_path)
    settings = run_settings(
        tmp_path, model__path=str(folder), data__pixels="levels", data__train="nowhere/*.tar"
    )
    with pytest.raises(CapabilityError, match=r"data\.pixels is levels"):
        run_recipe(resolve(settings, {}))
