"""`recipe check` and `plan` on the published models: nothing is loaded, no weight is there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.published_folder import published_folder
from support.published_names import PUBLISHED_CONFIGS, QWEN_CONFIGS, published_names, text_form
from support.recipes import copy_samples
from support.shards import ROOT
from typer.testing import CliRunner

from vlmpack.capabilities.config import is_prediction
from vlmpack.cli.app import app

NAMES = published_names()
TEXT_FORMS = ("Qwen3.6-27B", "Qwen3.6-35B-A3B", "Gemma-4-31B")
WITH_PREDICTION = (*QWEN_CONFIGS, "Nemotron-3.5-Lightning-30B-A3B")
"""Whose further layers are kept in an export, and neither loaded nor trained."""
CASES = [
    *((name, False) for name in NAMES),
    *((name, True) for name in TEXT_FORMS),
]


def model_of(name: str, *, text: bool) -> tuple[dict[str, Any], dict[str, list[int]]]:
    config, shapes = PUBLISHED_CONFIGS[name], NAMES[name]
    return text_form(config, shapes) if text else (config, shapes)


def recipe_for(tmp_path: Path, name: str, *, text: bool) -> Path:
    config, shapes = model_of(name, text=text)
    folder = tmp_path / "model"
    folder.mkdir()
    published_folder(folder, name, config, shapes)
    images = "vision_config" in config
    shard = tmp_path / "train-000000.tar"
    source = ROOT / "assets" / ("digits" if images else "text") / shard.name
    copy_samples(source, shard, 24)
    budget = {"max_vision_patches": 16384} if images else {}
    settings = {
        "model": {"path": str(folder)},
        "data": {"train": str(shard), "index_dir": str(tmp_path / "index"), "num_workers": 0},
        "packing": {"mode": "online", "max_tokens": 4096, **budget},
        "training": {
            "micro_batch_size": 1,
            "global_batch_size": 2,
            "seq_length": 4096,
            "max_steps": 4,
        },
        "optim": {"lr": 1e-4},
        "run_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def said(*arguments: object) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output


@pytest.mark.cases(slow=("Gemma-4-E2B-False", "Qwen3.6-35B-A3B-True"))
@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_published_model_is_checked_and_planned(tmp_path: Path, name: str, text: bool) -> None:
    recipe = recipe_for(tmp_path, name, text=text)
    assert "OK" in said("recipe", "check", recipe)
    plan = tmp_path / "plan.json"
    said("plan", recipe, "--json", plan)
    content = json.loads(plan.read_text(encoding="utf-8"))
    config, shapes = model_of(name, text=text)
    memory = content["memory"]
    kept = {one for one in shapes if is_prediction(one, config)}
    counted = {one: math.prod(shape) for one, shape in shapes.items() if one not in kept}
    assert memory["parameters"] == sum(counted.values())
    assert bool(kept) == (name in WITH_PREDICTION)
    tower = sum(n for one, n in counted.items() if ".visual." in one or ".vision_tower." in one)
    assert memory["tower_parameters"] == tower
    assert bool(tower) == ("vision_config" in config)
    parts = ("weights", "gradients", "optimizer", "activations", "logits")
    assert all(memory[part] > 0 for part in parts)
    assert memory["weights"] + memory["gradients"] > 4 * memory["parameters"]
