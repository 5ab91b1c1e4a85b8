"""metrics.jsonl: a row a step, and none of work that was lost."""

from __future__ import annotations

import io
import json
import re

import pytest

from vlmpack.terminal import open_console
from vlmpack.training import metrics
from vlmpack.training.metrics import (
    MetricsLog,
    Progress,
    StepRow,
    read_rows,
)
from vlmpack.training.preference import REPORT


def row(step, **changes):
    values = {
        "step": step,
        "epoch": 0,
        "loss": 1.5,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "num_tokens": 300,
        "num_slots": 400,
        "num_padded_slots": 600,
        "num_label_tokens": 30,
        "num_samples": 8,
        "num_skipped": 0,
        "num_rows": 2,
        "imbalance": 1.25,
        "seconds": 2.0,
        "data_wait_seconds": 0.5,
        "read_seconds": 0.1,
        "encode_seconds": 0.2,
        "forward_backward_seconds": 1.0,
        "optimizer_seconds": 0.4,
    }
    return StepRow(**(values | changes))


def steps_of(path):
    return [entry["step"] for entry in read_rows(path)]


def test_a_row_has_what_the_readme_promises(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", resume_step=0)
    log.write(row(1).as_row())
    (written,) = read_rows(tmp_path / "metrics.jsonl")  # readable before the log is closed
    log.close()
    assert {"step", "loss", "grad_norm", "num_tokens", "num_slots", "seconds"} <= written.keys()
    assert written["fill"] == 0.75
    assert written["padding"] == 0.25
    assert written["data_wait_share"] == 0.25
    assert written["imbalance"] == 1.25
    assert written["tokens_per_second"] == 150.0, "padding is never counted"


def test_an_evaluation_that_is_made_again_takes_the_place_of_the_first(tmp_path):
    """A run that was killed between an evaluation and the next checkpoint makes it again."""
    path = tmp_path / "metrics.jsonl"
    for loss in (2.0, 1.0):
        log = MetricsLog(path, resume_step=3)
        if loss == 2.0:
            log.write(row(2).as_row())
            log.write(row(3).as_row())
        log.write({"step": 3, "validation_loss": loss})
        log.write({"step": 3, "answers_anls": loss})
        log.write({"step": 4, "validation_loss": loss})
        log.close()
    assert steps_of(path) == [2, 3, 3, 3, 4]
    assert [one["validation_loss"] for one in read_rows(path) if "validation_loss" in one] == [1, 1]
    assert [one["answers_anls"] for one in read_rows(path) if "answers_anls" in one] == [1]


def test_a_step_of_holes_alone_has_no_loss_and_not_a_perfect_one(tmp_path, capsys):
    holes = row(2, loss=None, num_samples=0, num_label_tokens=0, num_tokens=0, num_skipped=8)
    log = MetricsLog(tmp_path / "metrics.jsonl", resume_step=0)
    log.write(holes.as_row())
    log.close()
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()
    MetricsLog(tmp_path / "metrics.jsonl", resume_step=2).close()
    assert steps_of(tmp_path / "metrics.jsonl") == [2]
    progress = Progress("plain", total_steps=3, interval_steps=1)
    progress.update(holes)
    said = capsys.readouterr().err
    assert said.startswith("step 2/3  no sample left  ")
    assert "loss" not in said
    progress.update(row(3, loss=0.0))
    assert "loss 0.0000" in capsys.readouterr().err, "one that was measured"


@pytest.mark.parametrize(("resume_step", "kept"), [(0, []), (2, [1, 2, 2]), (5, [1, 2, 2, 3, 4])])
def test_rows_after_the_resumed_step_are_dropped(tmp_path, resume_step, kept):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resume_step=0)
    for step in (1, 2):
        log.write(row(step).as_row())
    log.write({"step": 2, "validation_loss": 1.0})
    for step in (3, 4):
        log.write(row(step).as_row())
    log.close()
    again = MetricsLog(path, resume_step=resume_step)
    assert steps_of(path) == kept
    again.write(row(resume_step + 1).as_row())
    again.close()
    assert steps_of(path) == [*kept, resume_step + 1]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(1).as_row()) + '\n{"step": 2, "los', encoding="utf-8")
    assert steps_of(path) == [1]
    log = MetricsLog(path, resume_step=5)
    log.write(row(2).as_row())
    log.close()
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize(
    ("there", "resume_step", "lost"),
    [
        ([], 5, "5 steps (1 to 5)"),
        ([1, 2], 5, "3 steps (3 to 5)"),
        ([1, 2, 4], 5, "2 steps (3, 5)"),
        ([2, 4, 6, 8, 10], 11, "6 steps (1, 3, 5, 7, 2 more gaps)"),
        ([5], 5, "4 steps (1 to 4)"),
        ([1, 2, 3, 4, 5, 6], 5, None),
        ([], 0, None),
    ],
)
def test_steps_whose_rows_are_gone_are_named(tmp_path, caplog, there, resume_step, lost):
    """Rows of evaluations are no rows of steps."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 3, "validation_loss": 1.0}, *(row(step).as_row() for step in there)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with caplog.at_level("WARNING", "vlmpack"):
        MetricsLog(path, resume_step=resume_step).close()
    said = [record.getMessage() for record in caplog.records]
    assert [f"{path} has no rows of {lost}, which" in line for line in said] == [True] * bool(lost)


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_the_progress_line_shows_what_matters(capsys):
    progress = Progress("plain", total_steps=10, interval_steps=5)
    progress.start(0)
    for step in range(1, 11):
        progress.update(row(step))
    progress.stop()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/10", "step 5/10", "step 10/10"]
    assert lines[0].endswith(
        "loss 1.5000  150 real tokens/s  fill 75%  8 samples  imbalance 1.25  "
        "data wait 25%  ETA 0:18"
    )
    assert "imbalance" not in str(progress.columns(row(2, imbalance=1.0))), "one replica has none"


def test_rows_that_fit_no_graph_are_in_the_progress_line():
    progress = Progress("none", total_steps=3, interval_steps=1)
    columns = progress.columns(row(1, num_rows=4, num_eager_rows=1))
    assert columns[columns.index("8 samples") + 1] == "eager 1 of 4 rows"
    assert "eager" not in str(progress.columns(row(2, num_rows=4)))


def test_what_is_reported_beside_the_loss_stands_beside_it():
    told = row(1, reported={"router_loss": 1.0625, "unknown": None})
    columns = Progress("none", total_steps=2, interval_steps=1).columns(told)
    assert columns[:3] == ("loss 1.5000", "router loss 1.0625", "150 real tokens/s")
    assert told.as_row()["router_loss"] == 1.0625


PREFERENCE = {name: 1.5 if name == "preference_loss" else 0.25 for name in REPORT}


@pytest.mark.parametrize("reported", [{}, PREFERENCE], ids=["sft", "dpo"])
@pytest.mark.parametrize("width", [40, 80, 100, 300])
def test_a_narrow_terminal_keeps_bar_step_and_eta_and_whole_columns(monkeypatch, width, reported):
    text = io.StringIO()

    def console(*, stderr):
        return open_console(file=text, force_terminal=True, width=width, color_system=None)

    monkeypatch.setattr(metrics, "open_console", console)
    progress = Progress("auto", total_steps=1000, interval_steps=1)
    assert progress.kind == "rich"
    progress.start(0)
    told = row(500, reported=reported)
    progress.update(told)
    progress.stop()
    frames = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", text.getvalue()))
    shown = [frame.rstrip() for frame in frames if frame][-1]
    head, words = re.fullmatch(r"(\S{8} *500/1000 ETA 16:40)(.*)", shown).groups()
    assert len(shown) <= width
    every, kept = progress.columns(told), words.split()
    whole = [count for count in range(len(every) + 1) if " ".join(every[:count]).split() == kept]
    assert whole, f"{words!r} is cut inside of a column"
    count = whole[0]
    assert count == len(every) or len("  ".join(every[: count + 1])) > width - len(head) - 1
    least = {40: (), 300: every} | dict.fromkeys((80, 100), every[:3])
    assert every[:count][: len(least[width])] == least[width]
    assert ("preference loss" in str(every), "margin" in str(every)) == (False, bool(reported))


def test_no_progress_is_no_output(capsys):
    progress = Progress("none", total_steps=2, interval_steps=1)
    progress.start(0)
    progress.update(row(1))
    progress.stop()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
