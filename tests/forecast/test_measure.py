"""The parts of `plan --measure` that need no run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recipes import changed

from vlmpack.activity import Activity
from vlmpack.errors import RecipeError
from vlmpack.forecast.figures import Stage, StepSpeed
from vlmpack.forecast.launched import (
    MOST_WORDS,
    _Launched,
    is_enough,
    last_words,
    scaled,
    speed_of,
    spread_of,
    steps_ahead,
    together,
)
from vlmpack.forecast.measure import (
    QUIET,
    Counts,
    Layout,
    Trials,
    _stages,
    choices,
    measured_recipe,
    words,
)
from vlmpack.recipe import Recipe, load_recipe


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


def row(seconds: float, waited: float = 0.0, slots: int = 100, tokens: int = 80) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "data_wait_seconds": waited,
        "num_slots": slots,
        "num_tokens": tokens,
    }


def speed(seconds: float, *, steps: int = 8, slots: float = 100, tokens: float = 80) -> StepSpeed:
    return StepSpeed(
        measured_steps=steps, seconds=seconds, data_wait_seconds=0.0, slots=slots, tokens=tokens
    )


def test_the_first_steps_and_those_read_ahead_are_left_out() -> None:
    # 2 workers with 2 micro-batches each and one asked for: 5, in steps of 2: 3 steps, and 2.
    ahead = steps_ahead(recipe_with(data__num_workers=2, data__prefetch_batches=2).data, 2.0)
    assert ahead == 5
    slow = [row(9.0)] * ahead
    rows = [*slow, row(1.0, 0.25, 50), row(3.0, 0.75, 150)]
    found = speed_of(rows, ahead)
    assert found is not None
    assert (found.seconds, found.data_wait_share, found.slots) == (2.0, 0.25, 100.0)
    assert scaled(found, 0.5).seconds == 1.0
    assert scaled(found, 0.5).data_wait_share == 0.25


def test_a_run_that_ends_early_is_measured_by_its_last_half() -> None:
    found = speed_of([row(9.0), row(9.0), row(2.0), row(4.0)], 5)
    assert found is not None and found.seconds == 3.0 and found.measured_steps == 2
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
    import vlmpack.forecast.measure as module

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
        "validation: its first batch": 3.0,
        "validation": 2.0,
        "answering questions": 8.0,
        "saving a checkpoint": 0.5,
        "publishing a checkpoint": 0.5,
        "exporting the model": 1.0,
    }
    # Of 640 samples and questions the short run took 64, and answered twice; a loader is started
    # once for each validation, however many samples it has.
    counts = Counts(steps=100, questions=640, validated=640)
    assert _stages(recipe, counts, spent, other_seconds=20.0, few=64) == (
        Stage(what="launch", times=1, seconds=5.0),
        Stage(what="validation", times=3, seconds=23.0),
        Stage(what="answers", times=2, seconds=40.0),
        Stage(what="checkpoint", times=2, seconds=1.0),
        Stage(what="export", times=1, seconds=1.0),
    )
    beside_training = load_recipe(recipe, {"checkpoint.asynchronous": True})
    checkpoints = _stages(beside_training, counts, spent, other_seconds=17.0, few=64)[3]
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


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"starting\n[rank 0] error: no such file\nTraceback\n", "no such file"),
        (
            b"note: data error: none\nerror: 1 problem in the recipe:\n  data.train: none\n\nend",
            "1 problem in the recipe:\n  data.train: none",
        ),
        (
            b"[rank 0] error: out of memory\n[rank 1] error: the same as rank 0 has\n",
            "out of memory",
        ),
        (b"one\ntwo\n\n", "two"),
        (b"", "its processes ended without a word"),
    ],
)
def test_what_a_failed_run_said_is_its_error(said: bytes, told: str) -> None:
    assert last_words(said) == told
    assert len(last_words(b"error: " + b"x" * 2 * MOST_WORDS)) == MOST_WORDS


def test_a_run_that_stands_still_is_told_meanwhile(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_bytes(b"step 1\nno progress for 60 s: process 7: loading\n  its main th")
    launched = _Launched(process=None, log=log)  # type: ignore[arg-type]  # is not asked
    lines: list[str] = []
    launched.pass_on(lines.append)
    launched.pass_on(lines.append)
    assert lines == ["no progress for 60 s: process 7: loading"]
    with log.open("ab") as more:
        more.write(b"read stands at\nno progress for 120 s: process 7\n")
    launched.pass_on(lines.append)
    assert lines[1:] == ["no progress for 120 s: process 7"]


def trials_of(recipe: Recipe, tried: dict[str, list[StepSpeed]]) -> Trials:
    """As if these had been measured; the plan's mean step has 146.8 slots."""
    plan: Any = SimpleNamespace(
        mode=SimpleNamespace(slots=14_680, steps=100, rows=640), run_steps=1000
    )
    layout = Layout(recipe=recipe, processes=1, world_size=1, copies=1, all_copies=1)
    made = Trials(layout, plan, Path("unused"), 1.0, print)
    made.tried |= tried
    made.changes |= {name: {name: 0} for name in tried}
    return made


def test_settings_that_are_alike_are_ranked_alike() -> None:
    """A split with less padding has fewer slots in a step; what it trains is the same."""
    settings = {
        "": [speed(1.0, slots=100)],
        "training.micro_batch_size=2": [speed(1.0, slots=80)],
        "data.num_workers=2": [speed(2.0, slots=200, tokens=160)],
    }
    ranked = trials_of(recipe_with(), settings).ranked()
    assert [choice.training_seconds for choice in ranked] == pytest.approx([1468.0] * 3)
    slower = {**settings, "data.num_workers=2": [speed(1.1)], "data.num_workers=0": []}
    made = trials_of(recipe_with(), slower)
    made.failures["data.num_workers=0"] = "it broke"
    *_, last, failed = made.ranked()
    assert (last.change, last.training_seconds) == ("data.num_workers=2", pytest.approx(1614.8))
    assert (failed.change, failed.speed, failed.failure) == ("data.num_workers=0", None, "it broke")


def test_the_fastest_are_measured_twice_and_show_the_spread() -> None:
    settings = {
        "": [speed(1.0)],
        "a": [speed(0.8)],
        "b": [speed(1.2)],
        "c": [speed(0.9)],
        "d": [],
    }
    made = trials_of(recipe_with(), settings)
    assert made.contenders() == [{"c": 0}, {"a": 0}]
    assert spread_of(settings.values()) is None
    settings["a"].append(speed(0.84))
    settings[""].append(speed(1.02, tokens=80))
    assert spread_of(settings.values()) == pytest.approx(0.05)
    assert together(settings["a"]).seconds == pytest.approx(0.82)
    assert together([speed(1.0, steps=10), speed(4.0, steps=20)]).seconds == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training__micro_batch_size": 4}, 6.0),  # 24 samples a step
        ({"training__micro_batch_size": 4, "packing__mode": "none"}, 6.0),
        ({"training__micro_batch_size": 1, "packing__mode": "online"}, 6.4),  # 640 rows, 100 steps
    ],
)
def test_micro_batches_of_a_step(changes: dict[str, Any], expected: float) -> None:
    recipe = recipe_with(**changes)
    assert trials_of(recipe, {})._micro_batches(recipe) == pytest.approx(expected)


def test_a_recipe_with_all_that_is_evaluated_is_measured_quietly() -> None:
    recipe = recipe_with(
        data__validation="v.tar",
        data__test="t.tar",
        evaluation__generate=True,
        evaluation__interval_steps=10,
        evaluation__generate_interval_steps=20,
        evaluation__best="exact_match",
        evaluation__patience=3,
        export__weights="best",
        checkpoint__interval_steps=20,
    )
    layout = Layout(recipe=recipe, processes=1, world_size=1, copies=1, all_copies=1)
    quiet = measured_recipe(layout, QUIET)
    assert quiet.evaluation.best is None and not quiet.evaluation.generate
    assert quiet.checkpoint.interval_steps is None and not quiet.export.enabled
