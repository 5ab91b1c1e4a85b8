"""A language model without images, from the recipe of the repository to a folder that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import stored_tensors
from support.recipes import rows
from support.shards import ROOT
from support.stock import load_stock
from typer.testing import CliRunner

import vlmpack
from vlmpack.api import resolve
from vlmpack.cli.app import app
from vlmpack.data.packs.write import PackOrder
from vlmpack.evaluation.predictions import PREDICTIONS_AFTER, read_predictions
from vlmpack.run.packs import pack_recipe

RECIPE = ROOT / "recipes" / "text-sft.yaml"
STEPS = 20
COLUMNS = ("step", "loss", "grad_norm", "num_tokens", "num_samples")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's paths start there."""
    monkeypatch.chdir(ROOT)


def run(folder: Path, **overrides: Any) -> vlmpack.FinetuneResult:
    """The recipe, with all that it writes in a folder."""
    return vlmpack.finetune(
        RECIPE,
        run_dir=str(folder / "run"),
        data__index_dir=str(folder / "index"),
        data__num_workers=0,
        logging__progress="none",
        **overrides,
    )


@pytest.mark.slow
def test_the_recipe_lowers_the_loss_answers_and_exports(tmp_path: Path) -> None:
    result = run(tmp_path, training__max_steps=STEPS, evaluation__max_new_tokens=8)
    losses = [loss for (loss,) in rows(result.run_dir, "loss")]
    assert len(losses) == STEPS
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    figures = json.loads((result.run_dir / "result.json").read_text())
    assert figures["computed_tokens"] == figures["real_tokens"] < 0.6 * figures["padded_tokens"]
    assert result.exact_match_after is not None, "questions without images are the figures"
    predictions = read_predictions(result.run_dir / PREDICTIONS_AFTER)
    assert len(predictions) == 24
    assert all(row.num_images == 0 for row in predictions)
    page = (result.run_dir / "report" / "index.html").read_text()
    assert "all questions" in page
    assert "questions with images" not in page

    assert result.export is not None
    exported = dict(load_stock(result.export).named_parameters())
    trained = stored_tensors(result.run_dir / "checkpoints" / f"step-{STEPS:08d}")
    assert exported.keys() == {
        name.removeprefix("model.") for name in trained if name.startswith("model.")
    }
    for name, value in exported.items():
        error = (value - trained[f"model.{name}"]).norm() / value.norm()
        assert error < 2**-8, (name, "beyond the rounding of bfloat16")
    said = CliRunner().invoke(app, ["generate", "--model", str(result.export), "Repeat 4 2."])
    assert said.exit_code == 0, said.output


@pytest.mark.soak
def test_packs_of_the_recipe_train_what_the_online_run_trains(tmp_path: Path) -> None:
    settings = {
        "packing__mode": "online",
        "training__micro_batch_size": 1,
        "training__global_batch_size": 4,
        "training__max_steps": 5,
        "evaluation__generate": False,
    }
    online = rows(run(tmp_path / "online", **settings).run_dir, *COLUMNS, "num_rows", "num_slots")
    assert len({loss for _, loss, *_ in online}) == 5
    recipe = resolve(RECIPE, settings | {"data__index_dir": str(tmp_path / "index")})
    manifest = pack_recipe(recipe, tmp_path / "packs", PackOrder(kind="tokens"))
    assert manifest.num_packs > 5 * 4, "one epoch"
    assert min(samples for *_, samples, count, _ in online if count == 4) > 4, "packed"
    settings |= {"packing__mode": "offline", "packing__path": str(tmp_path / "packs")}
    offline = run(tmp_path / "offline", **settings).run_dir
    assert rows(offline, *COLUMNS, "num_rows", "num_slots") == online


@pytest.mark.soak
def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    steady = {"optim__schedule": "constant", "evaluation__generate": False}
    for name, lengths in (("once", (8,)), ("twice", (5, 8))):
        for length in lengths:
            run(tmp_path / name, training__max_steps=length, **steady)
    once, twice = (tmp_path / name / "run" for name in ("once", "twice"))
    assert len(rows(once, *COLUMNS)) == 8
    assert rows(once, *COLUMNS) == rows(twice, *COLUMNS)
    ours, theirs = (
        stored_tensors(folder / "checkpoints" / "step-00000008") for folder in (once, twice)
    )
    assert ours.keys() == theirs.keys()
    assert len(ours) > 60, "weights and two moments of 23 parameters"
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
