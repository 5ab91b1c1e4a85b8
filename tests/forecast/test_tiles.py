"""Memory of a model none of whose layers has an MLP that is computed in tiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.families import tiny_family_folder
from support.recipes import run_settings, write_recipe
from typer.testing import CliRunner

from vlmpack.cli.app import app


@pytest.mark.slow
def test_a_model_of_experts_alone_is_planned(tmp_path: Path) -> None:
    folder = tiny_family_folder("qwen3_vl_moe", tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["mlp_only_layers"] = []
    path.write_text(json.dumps(config))
    values = run_settings(tmp_path, model__path=str(folder), model__tiled_mlp=True)
    values["model"]["activation_checkpointing"] = "full"
    recipe = write_recipe(tmp_path / "recipe.json", values)
    done = CliRunner().invoke(app, ["plan", str(recipe)])
    assert done.exit_code == 0, done.output
