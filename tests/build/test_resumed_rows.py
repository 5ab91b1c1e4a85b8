"""Rows of a resumed run are as it began them, to train and to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, small_settings
from typer.testing import CliRunner

from vlmpack.build.data import build_encoder, data_spec, open_split
from vlmpack.build.look import open_recipe, open_train
from vlmpack.cli.app import app
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.distributed import Ranks
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
    data = data_spec(recipe, build_encoder(recipe), ONE, saved=state)
    train = open_split(data, "data.train", Ledger(None))
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
