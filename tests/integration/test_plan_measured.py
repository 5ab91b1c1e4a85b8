"""`vlmpack plan --measure` on real runs: what it says, what it leaves behind, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.recipes import changed, rows, write_recipe
from typer.testing import CliRunner

from vlmpack import finetune
from vlmpack.cli.app import app
from vlmpack.forecast.launched import MeasuredRunError
from vlmpack.forecast.measure import choices, measure_plan
from vlmpack.forecast.open import plan_recipe
from vlmpack.recipe import load_recipe

pytestmark = pytest.mark.slow


def measured(recipe: Path, *more: str) -> tuple[Any, str]:
    """The plan as JSON, and what was said meanwhile."""
    out = recipe.with_suffix(".json")
    options = ["--measure", "--measure-seconds", "0.2", "--json", str(out), *more]
    ran = CliRunner().invoke(app, ["plan", str(recipe), *options])
    assert ran.exit_code == 0, ran.output
    return json.loads(out.read_text()), ran.output


@pytest.mark.soak
def test_the_figures_are_those_of_a_run_and_nothing_is_left(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = changed(
        settings,
        training__max_steps=30,
        data__num_workers=1,
        data__validation=settings["data"]["train"],
        evaluation__interval_steps=10,
        evaluation__best="validation_loss",
        evaluation__patience=5,
        checkpoint__interval_steps=10,
        logging__trackers=["tensorboard"],
    )
    recipe = write_recipe(tmp_path / "recipe.yaml", settings)
    found, said = measured(recipe, "--no-choices")
    time = found["measured"]
    assert not Path(settings["run_dir"]).exists()
    assert not list(Path(settings["run_dir"]).parent.glob("*.measured-*"))
    running = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path) in command for command in running)
    assert "measuring a run of 2 steps" in said and "measuring the recipe as it is" in said
    assert "Time of the run" in said and "training steps" in said

    result = finetune(settings)
    slots = [slots for (slots,) in rows(result.run_dir, "num_slots")]
    own = next(one for one in time["choices"] if not one["change"])
    assert own["speed"]["measured_steps"] >= 8
    assert own["speed"]["slots"] == pytest.approx(sum(slots) / len(slots), rel=0.2)
    assert own["training_seconds"] == pytest.approx(30 * own["speed"]["seconds"])
    # No claim about speed, which a busy machine would break: a wrong unit or count is off by more.
    assert 1 / 5 < own["training_seconds"] / result.train_seconds < 5
    spent = sum(result.figures["seconds_of_launch"].values())
    assert 1 / 5 < time["seconds"] / spent < 5
    times = {stage["what"]: stage["times"] for stage in time["stages"]}
    assert times["launch"] == 1 and times["validation"] == 3
    assert time["seconds"] > own["training_seconds"] > 0
    phases = result.figures["seconds_of_launch"]
    assert sum(phases.values()) > result.train_seconds
    assert phases["validation"] > 0 and phases["forward and backward"] > 0
    assert phases["validation: its first batch"] > 0


@pytest.mark.soak
def test_what_is_ranked_changes_no_loss(tmp_path: Path, settings: dict[str, Any]) -> None:
    few = changed(settings, training__max_steps=3, evaluation__generate=False)
    recipe = load_recipe(few)
    changes = choices(recipe, world_size=1)
    assert {name for change in changes for name in change} == {
        *("training.micro_batch_size", "model.activation_checkpointing", "data.num_workers"),
    }
    losses = []
    for number, change in enumerate([{}, *changes]):
        run = load_recipe(recipe, {**change, "run_dir": str(tmp_path / str(number))})
        losses.append([loss for (loss,) in rows(finetune(run).run_dir, "loss")])
    assert len({*losses[0]}) == 3
    for change, found in zip(changes, losses[1:], strict=True):
        assert found == pytest.approx(losses[0], rel=2e-5), change


@pytest.mark.soak
def test_two_processes_are_measured_and_ended(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = changed(settings, training__global_batch_size=16, data__num_workers=0)
    recipe = write_recipe(tmp_path / "recipe.yaml", settings)
    found, said = measured(recipe, "--no-choices", "--world-size", "4", "training.max_steps=500")
    time = found["measured"]
    assert (time["processes"], time["copies"], time["all_copies"]) == (2, 2, 4)
    assert "measured with 2 of 4 copies" in said
    running = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path) in command for command in running)


@pytest.mark.soak
def test_a_choice_that_fails_is_named_and_the_recipe_that_fails_stops(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(changed(settings, training__max_steps=4))
    plan = plan_recipe(recipe, world_size=1)
    monkeypatch.setattr(
        "vlmpack.forecast.measure.choices",
        lambda recipe, world_size: [{"model.path": str(tmp_path / "no-model")}],
    )
    lines: list[str] = []
    made = measure_plan(recipe, plan, seconds=0.1, others=True, tell=lines.append)
    assert made.measured is not None
    own, broke = made.measured.choices
    assert own.speed is not None and not own.change and own.passes == 2
    assert broke.speed is None and "no-model" in broke.failure

    broken = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"path": str(tmp_path / "gone")})}
    )
    monkeypatch.setattr("vlmpack.forecast.measure._samples", lambda recipe, key: 0)
    with pytest.raises(MeasuredRunError, match=r"(?s)gone.*all that it said is in (.*)") as failed:
        measure_plan(broken, plan, seconds=0.1, others=False, tell=lines.append)
    log = Path(str(failed.value).rpartition(" is in ")[2])
    assert "error: " in log.read_text() and log.parent == Path(recipe.run_dir).parent
    assert not list(Path(recipe.run_dir).parent.glob("*.measured-*"))
