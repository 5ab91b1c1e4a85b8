"""`vlmpack verify` passes on every registered family's tiny model, with all its rows."""

from __future__ import annotations

import pytest
from support.families import FAMILIES, ROUTED, TEXT_FAMILIES, tiny_family_folder
from support.shards import mixed_samples, text_samples
from support.verified import Subject, failed

QUICK = {"qwen2_5_vl", "qwen3"}
SLOW = {"qwen3_vl", "qwen3_vl_moe", "internvl", "gemma3"}
"""One of each kind: deep features, experts, tiles, attention in both directions inside images."""


def _marks(name):
    if name in QUICK:
        return ()
    return pytest.mark.slow if name in SLOW else pytest.mark.soak


ALWAYS = {
    "samples",
    "boundaries",
    "labels and loss mask",
    "positions",
    "padding",
    "language model: each layer's output",
    "loss of each sample",
    "logits of each sample",
    "gradients: language model",
    "leak test",
    "frozen parameters stay",
    "trained components learn",
}
WITH_IMAGES = {
    "pixels in order",
    "tower: features",
    "projector: features",
    "gradients: tower",
    "gradients: projector",
}


WITH_STATE = {
    "segments of recurrent layers",
    "recurrences at their own inputs",
    "gradients: recurrent layers",
    "leak test of gradients",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in FAMILIES])
def test_it_passes_on_every_family(name, tmp_path):
    raw = text_samples()[:3] if name in TEXT_FAMILIES else mixed_samples()[:4]
    subject = Subject(tiny_family_folder(name, tmp_path), raw)
    checks = subject.checks()
    assert failed(checks) == set()
    wanted = ALWAYS | (set() if name in TEXT_FAMILIES else WITH_IMAGES)
    if subject.stock.recurrent:
        wanted |= WITH_STATE
    assert set(checks) - {"gradients: recurrent scalars"} == wanted
    assert {check.status for check in checks.values()} == {"pass"}
    assert (checks["leak test"].bound == 0.0) == (name not in ROUTED)
    assert checks["gradients: language model"].measured > 0, (
        "two runs, not one compared with itself"
    )
