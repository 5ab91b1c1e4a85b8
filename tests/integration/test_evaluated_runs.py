"""Evaluation on the way: it changes nothing that is learned, the best checkpoint stays and is what
is exported, and a run that does not get better stops; stopped and resumed too."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.drifts import DRIFTS
from support.exports import export_run
from support.recipes import changed, rows
from support.shards import TINY_MODEL
from support.whole_runs import run_until

import vlmpack
from vlmpack.errors import VlmpackError
from vlmpack.evaluation.predictions import predictions_at, read_predictions, write_predictions
from vlmpack.report.run_files import read_run
from vlmpack.report.samples import followed, metric_rows
from vlmpack.training.evaluations import Validation
from vlmpack.training.listener import Boundary
from vlmpack.training.metrics import read_rows
from vlmpack.training.run_dir import RunDir
from vlmpack.training.trainer import Trainer

SCORES = {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.5, 4: 0.4, 5: 0.95}
"""By step; step 5 is never reached with a patience of 2."""


class Scripted:
    """A metric that says what is written above, by the step that is answered."""

    def __init__(self) -> None:
        self.asked = 0
        self.step = 0

    def __call__(self, predictions: Any) -> float:
        return SCORES[self.step]


class Clock(vlmpack.Callback):
    def __init__(self, metric: Scripted) -> None:
        self.metric = metric

    def on_step(self, event: vlmpack.Event) -> None:
        self.metric.step = event.step


def evaluated(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Answers after every step; all of the answers' figures are the script's."""
    return changed(
        settings,
        data__validation=settings["data"]["train"],
        data__test=settings["data"]["train"],
        optim__schedule="constant",
        training__max_steps=5,
        evaluation__interval_steps=2,
        evaluation__max_samples=4,
        evaluation__generate=True,
        evaluation__generate_interval_steps=1,
        evaluation__generate_max_samples=3,
        evaluation__max_new_tokens=4,
        **changes,
    )


def finetuned(values: dict[str, Any], **changes: Any) -> vlmpack.FinetuneResult:
    metric = Scripted()
    return vlmpack.finetune(
        changed(values, **changes), metrics={"scripted": metric}, callbacks=[Clock(metric)]
    )


@pytest.mark.slow
def test_the_best_checkpoint_stays_and_is_what_is_exported(settings: dict[str, Any]) -> None:
    values = evaluated(
        settings,
        evaluation__metrics=["exact_match", "python:scripted"],
        evaluation__best="python:scripted",
        evaluation__patience=2,
        checkpoint__keep=1,
        export__enabled=True,
        export__weights="best",
        export__dtype="float32",
    )
    result = finetuned(values)
    run = Path(values["run_dir"])
    summary = json.loads((run / "data-summary.json").read_text())
    assert summary["test_also_in"] == ["data.train", "data.validation"]
    best = {"figure": "python:scripted", "value": 0.9, "step": 2, "waited": 2}
    assert result.figures["best"] == best
    assert result.figures["stopped_early"] is True and result.steps == 4
    assert result.figures["exported_step"] == 2
    assert sorted(path.name[-1] for path in (run / "checkpoints").iterdir()) == ["2", "4"]
    short = finetuned(
        evaluated(settings, run_dir=f"{run}-short", export__enabled=True, export__dtype="float32"),
        training__max_steps=2,
    )
    assert result.export is not None and short.export is not None
    ours, theirs = (load_file(at / "model.safetensors") for at in (result.export, short.export))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    last = load_file(next((run / "checkpoints").glob("*4")) / "model-00000-of-00001.safetensors")
    name = "model.language_model.embed_tokens.weight"
    assert not torch.equal(last[name], ours[name.replace("language_model.", "")]), "guard"
    later = export_run(run, merge=True)
    assert later.checkpoint.name[-1] == "2" and later.why.startswith("the best by python:scripted")
    again = load_file(later.folder / "model.safetensors")
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    card = (later.folder / "README.md").read_text()
    assert "step 2 of 4, the best one" in card and "| python:scripted | 90.0%" in card
    other = (export_run(run, merge=True, step=4).folder / "README.md").read_text()
    assert "step 4, its last one" in other and "| python:scripted | 40.0%" in other
    after = read_predictions(run / "predictions-after.jsonl")
    assert after == read_predictions(run / predictions_at(2)) and len(after) == 3
    found = {row["step"]: row["answers_python:scripted"] for row in answers(run)}
    assert found == pytest.approx({step: SCORES[step] for step in (1, 2, 3, 4)})
    page = (run / "report" / "index.html").read_text()
    assert "Answers by step" in page and "step 2" in page
    head, by_step = metric_rows(read_run(run))
    assert head == ("answers", "exact match", "python:scripted")
    assert [row[0] for row in by_step] == ["before", "step 1", "step 2", "step 3", "step 4"]
    assert by_step[2][2] == "90.0%"
    shown = followed(read_run(run), {})
    assert shown and [said.when for said in shown[0].said][:2] == ["before", "step 1"]


@pytest.mark.soak
def test_evaluation_on_the_way_changes_nothing_that_is_learned(settings: dict[str, Any]) -> None:
    exact = ("step", "loss", "grad_norm", "num_label_tokens")
    with_it, without = evaluated(settings), changed(evaluated(settings), run_dir="")
    without["run_dir"] = f"{settings['run_dir']}-plain"
    without["evaluation"] = {}
    finetuned(with_it)
    vlmpack.finetune(without)
    assert rows(with_it["run_dir"], *exact) == rows(without["run_dir"], *exact)
    assert len(answers(Path(with_it["run_dir"]))) == 5, "guard: it was evaluated"


@pytest.mark.soak
def test_a_run_that_was_stopped_goes_on_with_its_best(
    settings: dict[str, Any], monkeypatch: Any
) -> None:
    """SIGTERM in step 3: the validation losses, the best and its checkpoint are those of a run that
    was not stopped, and the answers of each step are there once."""
    whole = evaluated(settings, evaluation__best="validation_loss", checkpoint__keep=1)
    whole["run_dir"] += "-whole"
    parts = changed(whole, run_dir=settings["run_dir"])
    run_until(whole, None, monkeypatch, total=5)
    run_until(parts, 3, monkeypatch, total=5)
    run_until(parts, None, monkeypatch, total=5)
    one, two = (json.loads(Path(v["run_dir"], "result.json").read_text()) for v in (whole, parts))
    assert one["best"] == two["best"] and one["best"]["step"] in (2, 4, 5)
    assert [row["step"] for row in answers(Path(parts["run_dir"]))] == [1, 2, 3, 4, 5]
    best = f"step-{one['best']['step']:08d}"
    assert (Path(parts["run_dir"]) / "checkpoints" / best / "COMPLETE").is_file()


@pytest.mark.soak
def test_an_evaluation_that_a_signal_kept_from_being_made_is_made_by_the_resumed_run(
    settings: dict[str, Any], monkeypatch: Any
) -> None:
    """SIGTERM in step 3, the best one by the losses below: the run ends where one ends that was not
    stopped, and exports the same weights."""
    script(monkeypatch, [5.0, 4.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0])
    whole = changed(
        followed_by_loss(settings),
        run_dir=f"{settings['run_dir']}-whole",
        export__enabled=True,
        export__weights="best",
    )
    parts = changed(whole, run_dir=settings["run_dir"])
    run_until(whole, None, monkeypatch, total=8)
    run_until(parts, 3, monkeypatch, total=8)
    run_until(parts, None, monkeypatch, total=8)
    one, two = (json.loads(Path(v["run_dir"], "result.json").read_text()) for v in (whole, parts))
    assert one["best"]["step"] == one["exported_step"] == 3 and one["steps"] == 5, "guard"
    for name in ("best", "exported_step", "steps", "stopped_early"):
        assert one[name] == two[name]
    ours, theirs = (
        load_file(Path(v["run_dir"], "export", "model.safetensors")) for v in (whole, parts)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    kept = [
        sorted(p.name for p in Path(v["run_dir"], "checkpoints").iterdir()) for v in (whole, parts)
    ]
    assert kept[0] == kept[1] == ["step-00000003", "step-00000005"]
    found = [
        row["step"]
        for row in read_rows(Path(parts["run_dir"], "metrics.jsonl"))
        if "validation_loss" in row
    ]
    assert found == [1, 2, 3, 4, 5]


class Answered(vlmpack.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_answers(self, event: vlmpack.Event) -> None:
        self.steps.append(event.step)


@pytest.mark.soak
def test_answers_of_the_best_weights_are_told_with_their_step(
    settings: dict[str, Any], monkeypatch: Any
) -> None:
    """They are given after the last step, by the weights that were loaded for the export."""
    script(monkeypatch, [2.0, 1.0, 3.0])
    values = changed(
        followed_by_loss(settings),
        training__max_steps=3,
        evaluation__generate=True,
        evaluation__generate_max_samples=2,
        evaluation__max_new_tokens=4,
        export__weights="best",
    )
    told = Answered()
    assert vlmpack.finetune(values, callbacks=[told]).figures["exported_step"] == 2
    assert told.steps == [0, 2]


@pytest.mark.cases(slow="content")
@pytest.mark.slow
@pytest.mark.parametrize("other", ["folder", "content", None])
def test_answers_before_training_are_those_of_the_model_that_is_trained(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: Any, other: str | None
) -> None:
    """The first launch answers, is verified and ends in its first step; the second has another
    model, in another folder or in the same, or has the same one."""
    models = [shutil.copytree(TINY_MODEL, tmp_path / name) for name in ("model", "another")]
    values = changed(
        settings,
        model__path=str(models[0]),
        data__test=settings["data"]["train"],
        training__max_steps=1,
        evaluation__generate=True,
        evaluation__generate_max_samples=3,
        evaluation__max_new_tokens=4,
    )

    def run_out(*_: Any) -> None:
        raise VlmpackError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", run_out)
        with pytest.raises(VlmpackError, match="out of memory"):
            vlmpack.finetune(values)
    run = Path(values["run_dir"])
    before, proof = run / "predictions-before.jsonl", run / "verify" / "verify.json"
    first = [replace(row, answer="the first launch's") for row in read_predictions(before)]
    assert len(first) == 3 and not (run / "checkpoints").exists(), "guard"
    write_predictions(before, first)
    proof.parent.mkdir()
    proof.write_text("{}")
    first_id = RunDir(run).run_id()
    if other == "content":
        DRIFTS["another tower"][0](models[0])
    told = Answered()
    path = str(models[other == "folder"])
    result = vlmpack.finetune(changed(values, model__path=path), callbacks=[told])
    aside = run / "predictions-before.jsonl.old"
    if other is None:
        assert read_predictions(before) == first and told.steps == [1]
        assert result.figures["metrics_before"]["exact_match"] is not None
        assert proof.is_file() and not aside.exists()
    else:
        assert read_predictions(aside) == first and told.steps == [0, 1]
        assert "the first launch's" not in before.read_text()
        assert not proof.exists() and (run / "verify.old" / "verify.json").is_file()
    assert RunDir(run).run_id() != first_id, "it saved nothing"


@pytest.mark.soak
def test_a_larger_patience_alone_goes_on_behind_an_early_stop(
    settings: dict[str, Any], monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And then takes the steps of a run that had it from the start."""
    script(monkeypatch, [1.0, 2.0, 3.0, 0.5, 4.0, 4.0, 4.0, 4.0])
    mine = followed_by_loss(settings)
    assert vlmpack.finetune(mine).steps == 3
    for changes in ({}, {"training__max_steps": 9}, {"evaluation__patience": 1}):
        caplog.clear()
        with caplog.at_level("INFO", "vlmpack"):
            again = vlmpack.finetune(changed(mine, **changes))
        assert again.steps == 3 and again.figures["stopped_early"] is True
        assert "stopped early at step 3, after 2 evaluations without a better" in caplog.text
        assert "an evaluation.patience above 2 goes on with it" in caplog.text
        assert "max_steps" not in caplog.text
    more = changed(mine, training__max_steps=9, evaluation__patience=3)
    longer = vlmpack.finetune(more)
    assert longer.steps == 7 and longer.figures["best"]["step"] == 4
    other = changed(more, run_dir=f"{mine['run_dir']}-other")
    assert vlmpack.finetune(other).figures["best"] == longer.figures["best"]
    exact = ("step", "loss", "grad_norm")
    assert rows(mine["run_dir"], *exact) == rows(other["run_dir"], *exact)
    ended = vlmpack.finetune(changed(more, evaluation__patience=50))
    assert ended.steps == 9 and ended.figures["stopped_early"] is False


def script(monkeypatch: Any, losses: list[float]) -> None:
    """Validation losses by step, the first one's first; the last one stays."""
    own = Validation._validate

    def scripted(validation: Validation, here: Boundary) -> None:
        own(validation, here)
        if "validation_loss" in here.figures:
            here.figures["validation_loss"] = losses[min(here.step, len(losses)) - 1]

    monkeypatch.setattr(Validation, "_validate", scripted)


def followed_by_loss(settings: dict[str, Any]) -> dict[str, Any]:
    """Eight steps with a validation each, and a patience of two."""
    return changed(
        evaluated(settings),
        training__max_steps=8,
        evaluation__generate=False,
        evaluation__generate_interval_steps=None,
        evaluation__interval_steps=1,
        evaluation__best="validation_loss",
        evaluation__patience=2,
        checkpoint__keep=1,
    )


def answers(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / "metrics.jsonl") if "answers_exact_match" in row]
