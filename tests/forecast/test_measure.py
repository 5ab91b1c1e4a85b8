"""The parts of `plan --measure` that need no run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from support.recipes import changed

from vlmpack.activity import Activity
from vlmpack.errors import RecipeError
from vlmpack.forecast.measure.choices import choices, words
from vlmpack.forecast.measure.launched import MOST_WORDS, _last_words
from vlmpack.forecast.measure.speed import is_enough, scaled, speed_of, steps_ahead
from vlmpack.forecast.measure.surroundings import Counts, _stages
from vlmpack.forecast.measured import Stage
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.report.forecast.time_section import duration


def recipe_with(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"train": "unused.tar", "num_workers": 1},
        "training": {
            "micro_batch_size": 4,
            "global_batch_size": 24,
            "seq_length": 64,
            "max_steps": 100,
        },
        "optim": {"lr": 1e-3},
        "run_dir": "unused",
    }
    return load_recipe(changed(settings, **changes))


def row(seconds: float, waited: float = 0.0, slots: int = 100) -> dict[str, Any]:
    return {"seconds": seconds, "data_wait_seconds": waited, "num_slots": slots}


def test_the_first_steps_and_those_read_ahead_are_left_out() -> None:
    # 2 workers with 2 micro-batches each and one asked for: 5, in steps of 2: 3 steps, and 2.
    ahead = steps_ahead(recipe_with(data__num_workers=2, data__prefetch_batches=2).data, 2.0)
    assert ahead == 5
    slow = [row(9.0)] * ahead
    rows = [*slow, row(1.0, 0.25, 50), row(3.0, 0.75, 150)]
    speed = speed_of(rows, ahead)
    assert speed is not None
    assert (speed.seconds, speed.data_wait_share, speed.slots) == (2.0, 0.25, 100.0)
    assert scaled(speed, 50.0).seconds == 1.0
    assert scaled(speed, 0.0).seconds == 2.0


def test_a_run_that_ends_early_is_measured_by_its_last_half() -> None:
    speed = speed_of([row(9.0), row(9.0), row(2.0), row(4.0)], 5)
    assert speed is not None and speed.seconds == 3.0 and speed.measured_steps == 2
    assert speed_of([], 5) is None


def test_enough_is_steps_and_seconds() -> None:
    assert not is_enough([row(9.0)] * 7, 0, 10.0), "too few steps"
    assert not is_enough([row(1.0)] * 9, 0, 10.0), "too few seconds"
    assert not is_enough([row(1.0)] * 12, 5, 10.0), "the first ones do not count"
    assert is_enough([row(1.0)] * 15, 5, 10.0)


def test_choices_split_the_global_batch_evenly_and_keep_the_rest() -> None:
    recipe = recipe_with(model__backend="hf")
    changes = choices(recipe, world_size=2)  # 12 samples for each copy
    named = [words(change) for change in changes]
    assert "training.micro_batch_size=2" in named and "training.micro_batch_size=12" in named
    assert "model.activation_checkpointing=full" in named
    assert "data.num_workers=0" in named
    assert not any(name.startswith("packing.balance") for name in named), "no planned rows"
    for change in changes:
        changed_to = load_recipe(recipe, change)
        assert changed_to != recipe
        assert changed_to.training.global_batch_size == 24


def test_planned_rows_are_balanced_otherwise_and_not_split() -> None:
    recipe = recipe_with(packing__mode="online", training__micro_batch_size=1)
    named = [words(change) for change in choices(recipe, world_size=2)]
    assert "packing.balance=none" in named
    assert not any(name.startswith("training.") for name in named)
    alone = [words(change) for change in choices(recipe, world_size=1)]
    assert not any(name.startswith("packing.") for name in alone), "one copy has nobody to wait for"


def test_choices_that_the_rules_refuse_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import vlmpack.forecast.measure.choices as module

    def refuse(recipe: Recipe, change: dict[str, Any]) -> Recipe:
        if "model.activation_checkpointing" in change:
            raise RecipeError(["not here"])
        return recipe

    monkeypatch.setattr(module, "load_recipe", refuse)
    named = [words(change) for change in choices(recipe_with(), world_size=1)]
    assert named and not any("checkpointing" in name for name in named)


def test_stages_are_counted_by_the_runs_intervals() -> None:
    recipe = recipe_with(
        data__validation="v.tar",
        data__test="t.tar",
        evaluation__interval_steps=40,
        evaluation__generate=True,
        checkpoint__interval_steps=50,
    )
    spent = {
        "validation": 2.0,
        "answering questions": 8.0,
        "saving a checkpoint": 0.5,
        "publishing a checkpoint": 0.5,
        "exporting the model": 1.0,
    }
    # Of 640 samples and questions the short run took 64, and answered twice.
    counts = Counts(steps=100, questions=640, validated=640)
    assert _stages(recipe, counts, spent, beside=17.0, few=64) == (
        Stage(what="launch", times=1, seconds=5.0),
        Stage(what="validation", times=3, seconds=20.0),
        Stage(what="answers", times=2, seconds=40.0),
        Stage(what="checkpoint", times=2, seconds=1.0),
        Stage(what="export", times=1, seconds=1.0),
    )
    beside_training = load_recipe(recipe, {"checkpoint.asynchronous": True})
    checkpoints = _stages(beside_training, counts, spent, beside=17.0, few=64)[3]
    assert checkpoints.times == 1, "only the last one is waited for"


def test_phases_are_timed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("vlmpack.activity.time.monotonic", lambda: now[0])
    activity = Activity()
    for phase, seconds in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
        activity.enter(phase)
        activity.moved()  # what goes on begins nothing
        now[0] += seconds
    activity.enter("idle")
    assert activity.spent == {"idle": 0.0, "a": 5.0, "b": 2.0}


def test_what_a_failed_run_said_is_its_error() -> None:
    said = io.BytesIO(b"starting\n[rank 0] error: no such file\nTraceback\n")
    assert _last_words(said) == "no such file"
    assert _last_words(io.BytesIO(b"one\ntwo\n\n")) == "two"
    assert len(_last_words(io.BytesIO(b"error: " + b"x" * 999))) == MOST_WORDS
    assert _last_words(io.BytesIO()) == "its processes ended without a word"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (7.41, "7.41 s"), (89.0, "89 s"), (91.0, "1.52 min"), (7200, "2 h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
