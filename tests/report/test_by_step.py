"""Answers by step: which steps are shown, which is the best, and how many are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_runs import answers, write_run

from vlmpack.evaluation.predictions import predictions_at, write_predictions
from vlmpack.report import write_report
from vlmpack.report.run_files import RunFiles, read_run
from vlmpack.report.samples import MAX_STEPS, about_steps, best_row, followed, metric_rows


def answered_run(folder: Path, num_evaluations: int, **best: Any) -> RunFiles:
    """A run with answers after every tenth step."""
    asked = write_run(folder, num_steps=10 * num_evaluations, num_questions=4)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(10, 10 * num_evaluations + 1, 10):
            write_predictions(folder / predictions_at(step), answers(asked, 0.5))
            file.write(json.dumps({"step": step, "answers_exact_match": 0.5}) + "\n")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | ({"best": best} if best else {})))
    return read_run(folder)


def shown(run: RunFiles) -> list[str]:
    (said, *others) = [[said.when for said in one.said] for one in followed(run, {})]
    assert all(one == said for one in others)
    return said


@pytest.mark.cases(quick="100", slow="*")
@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize("step", [30, 70, 80, 100])
def test_the_best_of_many_steps_is_shown_and_marked(tmp_path: Path, step: int) -> None:
    run = answered_run(tmp_path, 10, figure="exact_match", value=0.5, step=step)
    steps = shown(run)
    assert steps[:2] == ["before", "step 10"] and steps[-1].startswith("step 100")
    assert [when for when in steps if "best" in when] == [f"step {step}, best"]
    num_shown = len(steps) - 1
    assert num_shown == MAX_STEPS + (step in (30, 80)), "guard: even distances pass those over"
    assert about_steps(run) == f"left out: {10 - num_shown} of 10 steps; best: by exact match"
    _, rows = metric_rows(run)
    (place,), line = best_row(run, rows)
    assert rows[place][0] == f"step {step}" and line == f"best: step {step}, by exact match"
    page = (write_report(tmp_path) / "index.html").read_text()
    assert f'<tr class="m"><td class="t">step {step}</td>' in page
    for text in (about_steps(run), line, f">step {step}, best</span>"):
        assert text in page


def test_a_run_that_follows_nothing_has_no_best_step(tmp_path: Path) -> None:
    few, many = answered_run(tmp_path / "few", 3), answered_run(tmp_path / "many", 20)
    assert shown(few) == ["before", "step 10", "step 20", "step 30"] and about_steps(few) == ""
    assert len(shown(many)) == 1 + MAX_STEPS and about_steps(many) == "left out: 12 of 20 steps"
    for run in (few, many):
        assert best_row(run, metric_rows(run)[1]) == ((), "")


def test_a_best_step_without_answers_is_not_named_beside_them(tmp_path: Path) -> None:
    run = answered_run(tmp_path, 3, figure="validation_loss", value=0.1, step=25)
    assert "best" not in " ".join(shown(run)) and about_steps(run) == ""
    assert best_row(run, metric_rows(run)[1]) == ((), "")
