"""What `vlmpack plan` predicts is what the data layer then does, to the last slot."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engines import make_engine
from support.plans import plan_inputs
from support.recipes import small_settings
from support.shard_fakes import FakeEncoder, config_for, write_shards
from support.shards import TINY_MODEL

from vlmpack.build.data import packing_mode
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan import batches
from vlmpack.encode import Encoder
from vlmpack.forecast import modes
from vlmpack.forecast.figures import ModeFigures, RunPlan
from vlmpack.forecast.make import plan_figures
from vlmpack.forecast.open import plan_recipe
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.recipe.data import OnErrorSection
from vlmpack.recipe.derived import multiples
from vlmpack.words import sized

COUNT = 203
MODES = ("none", "in_batch", "online, stream", "online, batch")
SEQ = 20
"""Tokens: some samples are longer, and dropped."""
SKIP = OnErrorSection(schema="skip")


def recipe_for(name: str, world_size: int = 1, **changes: Any) -> Recipe:
    mode, _, scope = name.partition(", ")
    planned = mode == "online"
    packing = {"mode": mode} | ({"scope": scope, "max_tokens": 40} if planned else {})
    settings = {
        "model": {"path": str(TINY_MODEL), "backend": "mcore"},
        "data": {"train": "unused.tar"},
        "packing": packing,
        "parallelism": {"context": 2 if world_size > 2 else 1},
        "training": {
            "micro_batch_size": 1 if planned else 4,
            "global_batch_size": 8,
            "seq_length": SEQ,
            "num_epochs": 2,
        },
        "optim": {"lr": 1e-3},
        "run_dir": "unused",
    }
    return load_recipe(load_recipe(settings), changes, world_size=world_size)


def open_as(
    recipe: Recipe, shards: str, index: Path, shuffle: str = "global", **changes: Any
) -> TrainData:
    """The split as such a run has it."""
    config = config_for(
        shards,
        index,
        mode=recipe.packing.mode,
        scope=recipe.packing.scope,
        max_tokens=recipe.packing.max_tokens,
        budget=packing_mode(recipe).budget,
        multiples=multiples(recipe.parallelism),
        micro_batch_size=recipe.training.micro_batch_size,
        global_batch_size=recipe.training.global_batch_size,
        seq_length=SEQ,
        over_long="drop",
        shuffle=shuffle,
        **changes,
    )
    return TrainData.open(config, FakeEncoder(refuse=frozenset({"q31 ", "q77 "})))


def planned(recipe: Recipe, data: TrainData, world_size: int) -> RunPlan:
    return plan_figures(
        plan_inputs(recipe, config=data.config, split=data.split, world_size=world_size)
    )


def done(data: TrainData, dp: int, steps: int) -> dict[str, float]:
    """What a run of one epoch computes on all its ranks."""
    ranks = [
        list(data.batches(data.start(), rank=rank, dp=dp, max_steps=steps)) for rank in range(dp)
    ]
    batches = [m.batch for steps in ranks for step in steps for m in step.micro_batches]
    assert {step.epoch for steps in ranks for step in steps} == {0}, "the epoch is shorter"
    assert ranks[0][-1].state.epoch == 1, "the epoch goes on"
    return {
        "steps": len(ranks[0]),
        "samples": sum(len(batch.keys) for batch in batches),
        "tokens": sum(batch.num_tokens for batch in batches),
        "slots": sum(batch.num_slots for batch in batches),
        "empty_rows": sum(not m.samples for steps in ranks for step in steps
                          for m in step.micro_batches),
        "holes": sum(len(step.skipped) for steps in ranks for step in steps),
        "max_row_slots": max(batch.num_slots for batch in batches),
        "rows": sum(batch.input_ids.shape[0] for batch in batches),
    }  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("plan")
    return write_shards(folder, COUNT, per_shard=50), folder / "index"


@pytest.mark.cases(
    quick=("in_batch-1 process", "online, stream-1 process"), slow="online, batch-dp 3 x cp 2"
)
@pytest.mark.parametrize("world_size", [1, 6], ids=["1 process", "dp 3 x cp 2"])
@pytest.mark.parametrize("name", MODES)
def test_the_plan_is_what_the_run_does(
    shards: tuple[str, Path], name: str, world_size: int
) -> None:
    copies = 3 if world_size > 1 else 1
    changes = {"training.global_batch_size": 24} if world_size > 1 else {}
    recipe = recipe_for(name, world_size, **changes)
    data = open_as(recipe, *shards, on_error=SKIP)
    plan = planned(recipe, data, world_size)
    own = plan.mode
    assert own.name == name
    found = done(data, copies, plan.steps_per_epoch)
    predicted = {key: getattr(own, key) for key in found.keys() - {"holes", "rows"}}
    assert predicted == {key: found[key] for key in predicted}
    assert own.rows + own.empty_rows == found["rows"]
    assert sum(plan.total.num_bad.values()) == found["holes"] == 2
    dropped = sum(plan.total.num_dropped.values())
    assert dropped == len(data.fitted.dropped) > 5
    assert plan.total.num_usable == own.samples == COUNT - dropped - 2
    assert plan.run_steps == data.steps_until(2, data.start()) > plan.steps_per_epoch
    if name == "none":
        assert own.padding > 0.1, "nothing to predict"
    if world_size > 1:
        assert own.empty_rows, "no step is short"


@pytest.mark.cases(slow="online, stream")
@pytest.mark.parametrize("name", ["in_batch", "online, stream"])
def test_shards_that_are_indexed_as_the_run_goes_on(
    shards: tuple[str, Path], tmp_path: Path, name: str
) -> None:
    recipe = recipe_for(name)
    data = open_as(recipe, shards[0], tmp_path / "index", shuffle="window", on_error=SKIP)
    data.split.index_all()
    plan = planned(recipe, data, 1)
    found = done(data, 1, plan.steps_per_epoch)
    for key in ("steps", "samples", "tokens", "slots"):
        assert getattr(plan.mode, key) == found[key], key
    assert plan.run_steps == data.steps_until(2, data.start())
    assert any("data.shuffle is window" in note for note in plan.notes)


def test_the_cost_of_the_sentinel_is_said(shards: tuple[str, Path], tmp_path: Path) -> None:
    recipe = recipe_for("in_batch")
    data = open_as(recipe, shards[0], tmp_path / "index", on_error=SKIP)
    assert not any("sentinel" in note for note in planned(recipe, data, 1).notes)
    training = data.config.training.model_copy(update={"sentinel_interval": 500})
    config = replace(data.config, training=training)
    plan = plan_figures(plan_inputs(recipe, config=config, split=data.split, world_size=2))
    (said,) = [note for note in plan.notes if "sentinel" in note]
    samples = plan.mode.samples / plan.mode.steps / 2
    share = float(said.partition("forward: ")[2].partition("%")[0]) / 100
    assert share == pytest.approx(1 / 3 / 500 / samples, abs=1e-5)
    assert 0 < share < 0.005


@pytest.mark.parametrize("shuffle", ["global", "window"])
@pytest.mark.parametrize("name", ["in_batch", "online, stream"])
def test_rows_of_a_long_epoch_are_estimates_and_its_samples_are_counted(
    shards: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, shuffle: str
) -> None:
    monkeypatch.setattr("vlmpack.data.plan.packers.MIN_WINDOW_SAMPLES", 16)
    monkeypatch.setattr("vlmpack.data.plan.packers.BATCHES_PER_WINDOW", 2)
    recipe = recipe_for(name)
    data = open_as(recipe, *shards, shuffle=shuffle, on_error=SKIP)
    data.split.index_all()
    exact = planned(recipe, data, 1)
    monkeypatch.setattr(modes, "LONG_EPOCH", COUNT // 2)
    monkeypatch.setattr(modes, "DRAWN_SAMPLES", 60)
    plan = planned(recipe, data, 1)
    assert plan.sources == exact.sources and plan.total == exact.total
    assert not any("are estimates" in note for note in exact.notes)
    said = re.compile(r"are estimates, from windows with ([6-9]\d|1[01]\d) samples")
    assert any(map(said.search, plan.notes))
    truths = {mode.name: mode for mode in exact.modes}
    for mode in plan.modes:
        truth = truths[mode.name]
        assert mode.is_estimated
        assert (mode.samples, mode.tokens) == (truth.samples, truth.tokens), mode.name
        assert mode.vision_patches == truth.vision_patches
        for key in ("rows", "slots", "steps", "compute"):
            assert getattr(mode, key) == pytest.approx(getattr(truth, key), rel=0.2), key
        if not mode.counts_rows:
            assert mode.steps == truth.steps
    assert plan.run_steps == pytest.approx(exact.run_steps, rel=0.2)
    assert plan.mode.rows != exact.mode.rows or name == "in_batch", "nothing was left out"


@pytest.mark.parametrize("least", [1, COUNT + 1])
def test_the_size_of_order_files_is_said(
    shards: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(batches, "LARGE", least)
    recipe = recipe_for("in_batch")
    data = open_as(recipe, shards[0], tmp_path / "index", on_error=SKIP)
    notes = [note for note in planned(recipe, data, 1).notes if note.startswith("the order of ")]
    assert len(notes) == len(list((tmp_path / "index").glob("*.order"))) == (least == 1)
    assert all("0.0 MiB for each pass, and 0.0 MiB more" in note for note in notes)


@pytest.mark.parametrize(("most", "said"), [(1, True), (64, False), (None, False)])
def test_a_graph_that_replays_next_to_no_row_is_said(
    shards: tuple[str, Path], most: int | None, said: bool
) -> None:
    recipe = recipe_for("online, stream")
    data = open_as(recipe, *shards, on_error=SKIP)
    mode = replace(data.config.mode, captures=most is not None, graph_sequences=most)
    config = replace(data.config, mode=mode)
    inputs = plan_inputs(recipe, config=config, split=data.split)
    plan = plan_figures(inputs)
    notes = [note for note in plan.notes if "run eagerly. The graph takes rows of up to 1 " in note]
    assert len(notes) == said
    assert plan.sequences.percentiles["p50"] > 1, "a graph of one sample a row takes next to none"


def test_other_modes_are_what_their_own_recipes_predict(shards: tuple[str, Path]) -> None:
    """The table's row of a mode is that mode's run, as far as the micro-batch is the same."""

    def comparable(mode: ModeFigures) -> ModeFigures:
        return replace(mode, is_recipes=False)

    plans = {}
    for name in MODES:
        recipe = recipe_for(name)
        plans[name] = planned(recipe, open_as(recipe, *shards, on_error=SKIP), 1)
    tables = {
        name: {mode.name: comparable(mode) for mode in plan.modes} for name, plan in plans.items()
    }
    assert tables["online, stream"]["online, batch"] == tables["online, batch"]["online, batch"]
    assert tables["online, batch"]["online, stream"] == tables["online, stream"]["online, stream"]
    assert tables["none"]["in_batch"] == tables["in_batch"]["in_batch"]
    assert tables["in_batch"]["none"] == tables["none"]["none"]
    assert len({mode.steps for mode in tables["none"].values()}) > 1


def test_every_epoch_is_packed_to_count_the_steps_of_the_run(shards: tuple[str, Path]) -> None:
    """Rows of another epoch are other rows, and not always as many."""
    changes = {"training.global_batch_size": 1, "training.num_epochs": 8}
    recipe = recipe_for("online, stream", **changes)
    data = open_as(recipe, *shards, on_error=SKIP)
    plan = planned(recipe, data, 1)
    assert plan.run_steps == data.steps_until(8, data.start())
    assert plan.run_steps != 8 * plan.steps_per_epoch, "all epochs have as many rows here"
    fixed = recipe_for("none")
    data = open_as(fixed, *shards, on_error=SKIP)
    assert planned(fixed, data, 1).run_steps == 2 * planned(fixed, data, 1).steps_per_epoch


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_copy_of_a_background_save_is_in_the_notes(tmp_path: Path, world_size: int) -> None:
    """What an engine writes after a step, dealt out to its copies."""
    saved = load_recipe(small_settings(tmp_path, training__micro_batch_size=2))
    engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL))
    engine.optimizer_steps = 1
    written = sum(value.nbytes for _, _, value in engine.owned_slices()) // world_size
    quiet = plan_recipe(saved, world_size=world_size)
    assert not any("checkpoint.asynchronous" in note for note in quiet.notes)
    recipe = load_recipe(saved, {"checkpoint.asynchronous": True})
    plan = plan_recipe(recipe, world_size=world_size)
    (note,) = [note for note in plan.notes if "checkpoint.asynchronous" in note]
    assert f"a copy of about {sized(written)} in the host memory" in note
