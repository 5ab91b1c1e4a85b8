"""Runs with `data.validation: 20%`: planned, trained, proven, in every mode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recipes import SMALL, changed, run_settings, write_recipe
from support.whole_runs import audited
from typer.testing import CliRunner

from vlmpack.api import resolve, run_recipe
from vlmpack.build.data import evaluation_mode
from vlmpack.build.look import open_train
from vlmpack.cli.app import app
from vlmpack.data.packs.write import PackOrder
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import RunIdentityError, VlmpackError
from vlmpack.recipe import load_recipe
from vlmpack.run.packs import pack_recipe
from vlmpack.training.metrics import read_rows

PLANNED = {"training__micro_batch_size": 1, "packing__max_tokens": 512}
MODES: dict[str, dict[str, Any]] = {
    "in_batch": {},
    "window": {"data__shuffle": "window"},
    "online": {"packing__mode": "online", **PLANNED, "training__global_batch_size": 2},
    "offline": {"packing__mode": "offline", **PLANNED, "training__global_batch_size": 2},
}


@pytest.mark.cases(quick=[], slow=["window", "offline"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_held_back_is_validated_and_never_trained(tmp_path: Path, mode: str) -> None:
    settings = run_settings(
        tmp_path,
        data__validation="20%",
        training__max_steps=None,
        training__num_epochs=1,
        evaluation={"generate": False, "interval_steps": 2, "batch_size": 4},
        checkpoint__interval_steps=2,
        **MODES[mode],
    )
    if mode == "offline":
        online = load_recipe(changed(settings, packing__mode="online"))
        pack_recipe(online, tmp_path / "packs", PackOrder(kind="tokens"))
        settings = changed(settings, packing__path=str(tmp_path / "packs"))
    run_dir = tmp_path / "run"
    recipe = resolve(settings, {})
    run_recipe(recipe)
    train, _ = open_train(run_dir)
    config = replace(train.config, key="data.validation", mode=evaluation_mode(recipe))
    held = TrainData.open(config, train.dataset.encoder).fitted
    others = train.fitted
    assert 1 < held.num_samples < SMALL / 2
    assert (held.eligible ^ others.eligible).all(), "each sample is on one side"
    trained = [name for line in lines(run_dir) for bin_ in line["bins"] for name in bin_]
    assert len(trained) == SMALL - held.num_samples
    keys = {held.table.key(number) for number in held.eligible.nonzero()[0].tolist()}
    assert keys.isdisjoint(name.partition("/")[2] for name in trained)
    assert audited(run_dir).num_problems == 0
    labels = int(held.table.num_label_tokens[held.eligible].sum())
    found = [row.get("validation_label_tokens") for row in read_rows(run_dir / "metrics.jsonl")]
    assert {count for count in found if count is not None} == {labels}
    with pytest.raises(RunIdentityError, match=r"data\.validation: '20%' in the run folder"):
        run_recipe(resolve(changed(settings, data__validation="30%"), {}))
    with pytest.raises(RunIdentityError, match=r"data\.validation"):
        run_recipe(resolve(changed(settings, data__validation=None, evaluation={}), {}))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The record of the run's global batches."""
    [path] = (run_dir / "samples").glob("rank-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_plan_and_inspect_say_what_is_held_back(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", run_settings(tmp_path, data__validation="20%"))
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", str(recipe)]).output
    found = told.partition("data.validation: 20% of data.train: ")[2].split()
    assert found[1:7] == ["of", str(SMALL), "samples", "are", "held", "back"], told
    for number in range(SMALL):
        key = f"train{number:05d}"
        ended = CliRunner().invoke(app, ["inspect", str(recipe), "--key", key, "-o", str(tmp_path)])
        if isinstance(ended.exception, VlmpackError):
            assert "held back for validation (data.validation: 20%)" in str(ended.exception)
            return
    pytest.fail("every sample has a row, those that are held back too")
