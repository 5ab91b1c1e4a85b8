"""Both tiny vision-language models are pretrained by one code path, which survives being cut."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.shards import ROOT

from assets.build import pretrain as build
from assets.build.model import QWEN2_5_VL, QWEN3_5
from assets.build.tokenizer import copy_tokenizer

pytestmark = pytest.mark.slow

SHORT = build.PretrainConfig(
    tower_steps=4, steps=8, glyphs_per_digit=4, checkpoint_every=3, log_every=2
)
"""The whole model learns from step 4 on; a checkpoint of each phase, and steps after the last."""


def cut_at(step, monkeypatch):
    """Stop the process in the middle of a step."""
    taken, losses = [], build.step_losses

    def stopped(*args):
        if len(taken) == step:
            raise KeyboardInterrupt
        taken.append(1)
        return losses(*args)

    monkeypatch.setattr(build, "step_losses", stopped)


@pytest.fixture(scope="module")
def glyphs():
    """Type, drawn once."""
    return build.glyph_bank(SHORT.glyphs_per_digit, SHORT.seed)


@pytest.mark.cases(slow="tiny-qwen3_5")
@pytest.mark.parametrize("shape", [QWEN2_5_VL, QWEN3_5], ids=lambda shape: shape.folder)
def test_a_run_that_was_cut_ends_with_the_weights_of_an_unbroken_one(
    shape, glyphs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(build, "glyph_bank", lambda *_: glyphs)
    source = ROOT / "assets" / QWEN2_5_VL.folder
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        copy_tokenizer(source, folder)
    build.pretrain(shape, whole, SHORT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_at(7, patch)
        build.pretrain(shape, cut, SHORT)
    shutil.copyfile(cut / build.CHECKPOINT, tmp_path / "kept.pt")
    assert torch.load(tmp_path / "kept.pt", weights_only=True)["step"] == 6
    build.pretrain(shape, cut, SHORT)
    found, expected = (load_file(folder / "model.safetensors") for folder in (cut, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not list(cut.glob("pretraining*"))
    assert "step 8 answer" in capsys.readouterr().out
