"""`vlmpack plan` beside the metrics.jsonl of a run of the same recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.families import tiny_family_folder
from support.recipes import changed, rows, write_recipe
from typer.testing import CliRunner

from vlmpack import finetune
from vlmpack.cli.app import app
from vlmpack.errors import RecipeError, VlmpackError
from vlmpack.forecast import open as opening
from vlmpack.forecast.parameters import UnknownSizesError

MODES: dict[str, dict[str, Any]] = {
    "none": {"packing__mode": "none"},
    "in_batch": {},
    "online, stream": {"packing__mode": "online", "training__micro_batch_size": 1},
    "online, batch": {
        "packing__mode": "online",
        "packing__scope": "batch",
        "training__micro_batch_size": 1,
    },
    "online, stream, fixed shapes": {
        "packing__mode": "online",
        "packing__pad_to_max_length": True,
        "training__micro_batch_size": 1,
    },
    "offline, saved": {"packing__mode": "online", "training__micro_batch_size": 1},
}


@pytest.mark.cases(slow="online, batch")
@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_a_run_of_one_epoch_does_what_its_plan_says(
    tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    settings = changed(
        settings,
        **{
            "training__max_steps": None,
            "training__num_epochs": 1,
            "training__seq_length": 100,
            "data__over_long": "drop",
            **MODES[name],
        },
    )
    recipe, out = write_recipe(tmp_path / "recipe.yaml", settings), tmp_path / "plan.json"
    if name == "offline, saved":
        packs = tmp_path / "packs"
        ran = CliRunner().invoke(app, ["pack", str(recipe), "--planner", "bfd", "-o", str(packs)])
        assert ran.exit_code == 0, ran.output
        offline = changed(settings, packing__mode="offline", packing__path=str(packs))
        write_recipe(recipe, offline)
    ran = CliRunner().invoke(app, ["plan", str(recipe), "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    plan = json.loads(out.read_text())
    (own,) = [mode for mode in plan["modes"] if mode["is_recipes"]]
    assert own["name"] == name.removesuffix(", fixed shapes")
    result = finetune(recipe)
    names = ("num_tokens", "num_slots", "num_samples", "num_label_tokens", "num_skipped")
    tokens, slots, samples, labels, skipped = (
        sum(column) for column in zip(*rows(result.run_dir, *names), strict=True)
    )
    assert result.steps == plan["run_steps"] == own["steps"] > 1
    assert (tokens, slots, samples) == (own["tokens"], own["slots"], own["samples"])
    assert tokens / slots == own["fill"]
    assert labels == plan["total"]["num_label_tokens"]
    assert skipped == sum(plan["total"]["num_bad"].values()) == 0
    summary = json.loads((Path(result.run_dir) / "data-summary.json").read_text())["summary"]
    assert summary["num_dropped"] == sum(plan["total"]["num_dropped"].values()) > 0
    assert name not in ("none", "online, stream, fixed shapes") or own["padding"] > 0.05


@pytest.mark.slow
def test_a_world_size_says_how_many_ranks_share_a_batch(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = changed(settings, training__micro_batch_size=2, training__global_batch_size=8)
    recipe, page = write_recipe(tmp_path / "recipe.yaml", settings), tmp_path / "plan.html"
    command = ["plan", str(recipe), "--world-size", "2", "--json", "-", "--html", str(page)]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    plan = json.loads(ran.stdout)
    (own,) = [one for one in plan["imbalance"] if one["is_recipes"]]
    assert (own["data_parallel"], own["micro_batches"]) == (2, 2)
    assert 1 <= own["total_balanced"] < own["total_dealt"]
    assert plan["memory"]["parameters"] > 1_000_000
    assert page.read_text().count("<figure>") == 4
    assert not (tmp_path / "run").exists(), "a plan leaves no run behind"


def test_mistakes_are_named_before_anything_is_read(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", settings)
    nowhere = tmp_path / "nowhere" / "page.html"
    ran = CliRunner().invoke(app, ["plan", str(recipe), "--html", str(nowhere)])
    assert isinstance(ran.exception, VlmpackError)
    assert f"the folder {nowhere.parent} does not exist" in str(ran.exception)
    odd = write_recipe(tmp_path / "odd.yaml", changed(settings, training__global_batch_size=6))
    ran = CliRunner().invoke(app, ["plan", str(odd), "--world-size", "4"])
    assert isinstance(ran.exception, RecipeError)
    assert "global_batch_size" in str(ran.exception)
    assert not (tmp_path / "index").exists()


@pytest.mark.slow
def test_what_is_said_of_memory_with_adapters_does_not_contradict_itself(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Memory is that of the adapters, and no note says that it is that of every weight."""
    lora = changed(settings, trainable__vision="frozen", trainable__language="lora")
    memory, notes = {}, {}
    for name, values in (("all", settings), ("lora", lora)):
        recipe, out = write_recipe(tmp_path / f"{name}.yaml", values), tmp_path / f"{name}.json"
        ran = CliRunner().invoke(app, ["plan", str(recipe), "--json", str(out)])
        assert ran.exit_code == 0, ran.output
        plan = json.loads(out.read_text())
        memory[name], notes[name] = plan["memory"], plan["notes"]
    assert memory["lora"]["gradients"] < memory["all"]["gradients"] / 4
    assert any("of trained parameters alone" in line for line in memory["lora"]["formula"])
    assert notes["lora"] == notes["all"] != []


@pytest.mark.cases(quick="nemotron_h", slow="gemma4")
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "gemma4"])
def test_models_whose_layers_differ_are_planned(
    tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    (tmp_path / "model").mkdir()
    folder = tiny_family_folder(name, tmp_path / "model")
    settings = changed(settings, model__path=str(folder), data__on_error={"schema": "skip"})
    recipe, out = write_recipe(tmp_path / "recipe.yaml", settings), tmp_path / "plan.json"
    ran = CliRunner().invoke(app, ["plan", str(recipe), "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    memory = json.loads(out.read_text())["memory"]
    (own,) = [mode for mode in json.loads(out.read_text())["modes"] if mode["is_recipes"]]
    assert own["samples"] > 0 and memory["activations"] > 0
    said = [line for line in memory["formula"] if line.startswith("a layer that carries state")]
    assert len(said) == (name != "gemma4")


def test_a_model_whose_sizes_nobody_knows_is_planned_without_its_memory(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(folder: Path) -> None:
        raise UnknownSizesError(f"{folder} does not say 'depth', so memory cannot be estimated")

    monkeypatch.setattr(opening, "read_sizes", unknown)
    recipe, out = write_recipe(tmp_path / "recipe.yaml", settings), tmp_path / "plan.json"
    ran = CliRunner().invoke(app, ["plan", str(recipe), "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    plan = json.loads(out.read_text())
    assert plan["memory"] is None
    assert plan["notes"][0].endswith("does not say 'depth', so memory cannot be estimated")
    ran = CliRunner().invoke(app, ["plan", str(recipe)])
    assert "does not say 'depth'" in " ".join(ran.output.split())
