"""The recipes for models of published sizes take three steps on tiny models of their shapes."""

from __future__ import annotations

import json
import math

import pytest
from support.families import tiny_family_folder
from support.published_recipes import PUBLISHED, placed
from support.shards import ROOT
from support.whole_runs import finetune_in_ranks

pytestmark = pytest.mark.slow

STEPS = 3
SMALL = (
    "model.dtype=float32",
    "packing.max_tokens=768",
    "packing.max_vision_patches=null",
    "training.seq_length=512",
    f"training.max_steps={STEPS}",
    "training.num_epochs=null",
    "training.global_batch_size=4",
    "optim.warmup_steps=1",
    "evaluation.interval_steps=null",
    "logging.progress=none",
)
"""What every twin changes beside its own: sizes, and no validation on the way."""


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tiny_family_folder(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.mark.soak
@pytest.mark.parametrize("name", PUBLISHED)
def test_three_steps(tmp_path, twins, name):
    entry = PUBLISHED[name]
    given = placed(entry, twins(entry.twin), tmp_path, samples=60)
    recipe = ROOT / f"recipes/{name}.yaml"
    overrides = [*given, *SMALL, *entry.on_twin]
    done = finetune_in_ranks(recipe, *overrides, processes=entry.twin_processes)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "grad_norm" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert (tmp_path / "run/result.json").is_file()
