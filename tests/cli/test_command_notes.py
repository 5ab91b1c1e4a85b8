"""What commands say about options and folders that are easy to mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vlmpack.cli.app import app
from vlmpack.data.packs.manifest import other_packs
from vlmpack.recipe import dump_recipe, load_recipe


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def pack(recipe: Path, folder: Path, *options: str) -> Result:
    done = invoke("pack", recipe, "-o", folder, "--processes", 1, *options)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.slow
def test_other_packs_are_told_apart_by_folder_kind_and_planner(
    inspect_recipe: Path, tmp_path: Path
) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    told = pack(inspect_recipe, one, "--media", "resized").stderr
    assert "--media resized changes nothing in --kind plan" in told
    assert "--media" not in pack(inspect_recipe, two, "--planner", "bfd").stderr
    pack(inspect_recipe, three, "--kind", "tokens")

    assert other_packs(one, two) == (
        f"the run's latest launch had {one} (kind plan, planner stream), the recipe "
        f"has {two} (kind plan, planner bfd)"
    )
    assert other_packs(one, three) is None, "the same plan"
    assert other_packs(one, one) is None
    assert f"{tmp_path / 'none'} (no packs there)" in str(other_packs(one, tmp_path / "none"))


def test_a_run_folder_is_planned_by_its_recipe(inspect_recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(load_recipe(inspect_recipe)))
    plans = []
    for place in (inspect_recipe, run):
        out = tmp_path / "plan.json"
        shown = invoke("plan", place, "--json", out)
        assert shown.exit_code == 0, shown.output
        assert "config.json, as transformers builds it" in " ".join(shown.output.split())
        plans.append(json.loads(out.read_text()))
    assert plans[0] == plans[1] and plans[0]["total"]["num_samples"] > 0
    (run / "recipe.yaml").unlink()
    assert "a run folder that holds recipe.yaml" in str(invoke("plan", run).exception)
