"""Rows of a run that goes on are as it began them, to train and to look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, small_settings
from typer.testing import CliRunner

from vlmpack.build.data import build_encoder, open_split
from vlmpack.build.read_only import open_recipe, open_train
from vlmpack.build.setup import Setup
from vlmpack.cli.app import app
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState, Era
from vlmpack.distributed import Ranks
from vlmpack.errors import RunIdentityError
from vlmpack.recipe import dump_recipe, load_recipe
from vlmpack.training.record import open_record
from vlmpack.training.run_dir import RunDir

ONE = Ranks()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: Any) -> dict[str, Any]:
    """A recipe with rows aligned to 16: 256 tokens, where the default of 8 would give 248."""
    return small_settings(
        tmp_path_factory.mktemp("begun"),
        packing__mode="online",
        packing__alignment=16,
        training__micro_batch_size=1,
        training__global_batch_size=1,
        training__seq_length=248,
    )


@pytest.fixture(scope="module")
def first(begun: dict[str, Any]) -> TrainData:
    return open_recipe(load_recipe(begun))[0]


@pytest.fixture(scope="module")
def run(begun: dict[str, Any], first: TrainData) -> RunDir:
    """Resumed without `packing.alignment`: its recipe.yaml does not name it any more."""
    run_dir = RunDir(Path(begun["run_dir"]))
    run_dir.prepare()
    for start in (0, 1):
        open_record(run_dir.samples, ONE, start=start, state=first.start().to_json())
    recipe = load_recipe(changed(begun, packing__alignment=None))
    run_dir.recipe.write_text(dump_recipe(recipe))
    return run_dir


def bins(train: TrainData) -> list[Any]:
    return [planned.bins for planned in train.planned(train.start(), 8)]


def test_a_run_is_opened_with_the_rows_that_it_inherited(run: RunDir, first: TrainData) -> None:
    again, _ = open_train(run.path)
    assert again.identity == first.identity and bins(again) == bins(first)
    assert again.identity["packing.alignment"] == 16
    fresh, _ = open_recipe(load_recipe(run.recipe))
    assert bins(fresh) != bins(first), "any alignment would have done"
    other, _ = open_train(run.path, ["packing.alignment=8"])
    assert other.identity == fresh.identity, "what is asked for wins"


def test_a_run_that_inherits_its_rows_is_shown(run: RunDir, first: TrainData) -> None:
    told = CliRunner().invoke(app, ["data", "show", str(run.path), "--batch", "1"])
    assert told.exit_code == 0, told.exception
    (samples,) = bins(first)[1]
    for number in samples:
        assert first.ref(number).key in told.output
    other = ["data", "show", str(run.path), "packing.alignment=8", "--batch", "1"]
    assert "the run has 16, now 8" in str(CliRunner().invoke(app, other).exception)


def resumed(settings: dict[str, Any], state: DataState | None) -> TrainData:
    recipe = load_recipe(settings)
    setup = Setup(recipe=recipe, ranks=ONE, encoder=build_encoder(recipe))
    train = open_split(setup, "data.train", Ledger(None), resume=state)
    assert train is not None
    return train


def test_fixed_rows_have_the_width_that_the_run_began_with(
    begun: dict[str, Any], first: TrainData
) -> None:
    settings = changed(
        begun,
        packing__alignment=None,
        packing__pad_to_max_length=True,
        packing__pad_cu_seqlens=True,
    )
    for state, width in ((first.start(), 256), (None, 248)):
        train = resumed(settings, state)
        fixed, budget = train.dataset.collator.fixed, train.plan.packer.budget
        assert fixed is not None and fixed.row_tokens == width
        assert budget is not None and budget.max_tokens == width
        assert train.config.mode.budget == budget, "the mode is settled, too"
        steps = list(train.batches(train.start(), rank=0, dp=1, max_steps=4))
        assert {mb.batch.num_slots for step in steps for mb in step.micro_batches} == {width}


def earlier(state: DataState) -> DataState:
    """The state as a version wrote it that always chose from 64 samples."""
    last = state.eras[-1]
    identity = {name: value for name, value in last.identity.items() if name != "packing.buffer"}
    return replace(state, eras=(*state.eras[:-1], Era(last.start_batch, identity)))


def buffer_of(train: TrainData) -> int | None:
    budget = train.plan.packer.budget
    assert budget is not None
    return budget.buffer


def test_a_run_of_an_earlier_version_keeps_its_buffer(
    begun: dict[str, Any], first: TrainData, tmp_path: Path
) -> None:
    today, before = first.start(), earlier(first.start())
    assert today.identity["packing.buffer"] == "window" and buffer_of(first) is None
    with pytest.raises(RunIdentityError, match=r"packing\.buffer: the run has None, now 'window'"):
        first.admit(before)
    for on_data_change in ("refuse", "new_era"):
        settings = changed(begun, checkpoint__on_data_change=on_data_change)
        again = resumed(settings, before)
        assert buffer_of(again) == 64
        assert again.identity == before.identity == again.admit(before).identity
        assert buffer_of(resumed(settings, today)) is None
    run_dir = RunDir(tmp_path)
    run_dir.prepare()
    open_record(run_dir.samples, ONE, start=0, state=before.to_json())
    run_dir.recipe.write_text(dump_recipe(load_recipe(begun)))
    assert buffer_of(open_train(run_dir.path)[0]) == 64, "to look at, too"
