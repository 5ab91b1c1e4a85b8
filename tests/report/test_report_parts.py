"""What the pictures and tables say is what the files say."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from support.fake_runs import answers, data_summary, metrics_rows, questions, write_run

from vlmpack.report import run_pictures
from vlmpack.report.run_files import DataSummary, RunFiles, read_run
from vlmpack.report.run_pictures import (
    draw_lengths,
    draw_loss,
    lengths_pictures,
    padding_removed,
    percentile,
    smooth,
    typical_batch,
)
from vlmpack.report.samples import MIN_WRONG, choose
from vlmpack.report.write import facts, headline, metric_tables, spread_rows


def summary(batches: list[list[int]]) -> DataSummary:
    lengths = Counter(length for batch in batches for length in batch)
    return DataSummary(
        packing_mode="in_batch",
        lengths=dict(sorted(lengths.items())),
        padded_tokens=sum(len(b) * max(b) for b in batches),
        packed_tokens=sum(map(sum, batches)),
        real_tokens=sum(map(sum, batches)),
        micro_batches=tuple(map(tuple, batches)),
    )


def test_smoothing_keeps_a_constant_and_starts_at_the_first_value() -> None:
    assert smooth([3.0] * 5, 4) == pytest.approx([3.0] * 5)
    assert smooth([5.0, 1.0], 9)[0] == pytest.approx(5.0)
    assert smooth([1.0, 2.0, 4.0], 1) == [1.0, 2.0, 4.0]


def test_padding_removed_is_the_share_of_padded_slots() -> None:
    assert padding_removed(summary([[10, 30], [20, 20]])) == pytest.approx(1 - 80 / 100)


def test_typical_batch_has_the_padding_of_the_whole_run() -> None:
    assert typical_batch(summary([[10, 10], [5, 20], [1, 40]])) == (5, 20)


def test_percentiles_are_lengths_that_occur() -> None:
    lengths = {10: 90, 50: 5, 900: 5}
    assert [percentile(lengths, share) for share in (0.05, 0.5, 0.95, 0.96)] == [10, 10, 50, 900]


@pytest.mark.cases(quick="2", slow="20")
@pytest.mark.parametrize("num_steps", [1, 2, 20])
def test_loss_is_drawn_for_any_number_of_steps(tmp_path, num_steps: int) -> None:
    write_run(tmp_path, num_steps=num_steps, num_questions=4)
    run = read_run(tmp_path)
    assert draw_loss(run)
    picture = run_pictures.loss_picture(run)
    assert picture is not None
    for drawing in (picture.narrow, picture.wide):
        shown = set(re.findall(r">([^<>]+)</text>", drawing))
        assert {"learning rate", "optimizer step"} <= shown
        assert any(text.startswith("loss per label token") for text in shown)
        assert sum(text.startswith(("train ", "validation ")) for text in shown) == 2


def test_loss_of_zero_and_lost_values_are_drawn(tmp_path) -> None:
    values = (float("nan"), 0.0, 9.0, None)
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(values, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    assert run.series("loss") == ([2, 3], [0.0, 9.0])
    assert draw_loss(run)


@pytest.mark.cases(slow="values0")
@pytest.mark.parametrize("values", [(1.9,), (2.5, 1.4, 1.1, 1.05)])
def test_the_load_balancing_loss_is_drawn_between_loss_and_learning_rate(
    tmp_path, monkeypatch, values
) -> None:
    drawn = []
    draw = run_pictures._draw_router_loss

    def noted(axes, steps, losses, form):
        draw(axes, steps, losses, form)
        drawn.append(
            (steps, losses, [text.get_text() for text in axes.texts], len(axes.figure.axes))
        )

    monkeypatch.setattr(run_pictures, "_draw_router_loss", noted)
    rows = [{"step": n, "loss": 2.0, "router_loss": value} for n, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert draw_loss(read_run(tmp_path))
    ((steps, losses, (said,), panels),) = drawn
    assert (steps, losses, panels) == ([*range(len(values))], [*values], 3)
    assert said.startswith(f"router {smooth(values, 1)[-1]:.3g}")
    write_run(tmp_path, num_steps=3, num_questions=1)
    assert draw_loss(read_run(tmp_path))
    assert len(drawn) == 1, "a dense model has none"


@pytest.mark.cases(slow="0.6")
@pytest.mark.parametrize("last", [0.6, 0.01])
def test_what_a_loss_is_a_mean_over_stands_at_its_axis(tmp_path, monkeypatch, last) -> None:
    """Whole, in each form of the picture."""
    drawn = []
    label_ends = run_pictures._label_ends

    def noted(axes, labels, form):
        label_ends(axes, labels, form)
        drawn.append(axes)

    monkeypatch.setattr(run_pictures, "_label_ends", noted)
    scale = "" if last == 0.6 else " (log)"
    for more, unit in (
        ({}, "label token"),
        ({"preference_loss": 0.5, "loss_divisor": 4.0}, "pair"),
        ({"loss_divisor": 16.0, "router_loss": 1.5}, "unit of its divisor"),
    ):
        rows = [{"step": n, "loss": loss} | more for n, loss in enumerate((0.7, last))]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = read_run(tmp_path)
        assert draw_loss(run) and run_pictures.loss_picture(run)
        assert [axes.get_ylabel() for axes in drawn] == [f"loss per {unit}{scale}"] * 3
        for axes in drawn:
            FigureCanvasAgg(axes.figure).draw()
            room, taken = axes.figure.bbox, axes.yaxis.label.get_window_extent()
            assert taken.x0 >= room.x0 and taken.y0 >= room.y0 and taken.y1 <= room.y1
        drawn.clear()


@pytest.mark.cases(quick="batch2", slow="batch1")
@pytest.mark.parametrize("batch", [[1], [50] * 16, [900, 20, 20, 20]])
def test_lengths_of_any_shape_are_drawn(tmp_path, batch: list[int]) -> None:
    write_run(tmp_path, num_steps=1, num_questions=1)
    run = replace(read_run(tmp_path), data=summary([batch]))
    assert draw_lengths(run)
    lengths, packed = lengths_pictures(run)
    assert f"{len(batch)} training sample" in lengths.caption
    slots = f"{len(batch)} x {max(batch):,} = {len(batch) * max(batch):,} slots"
    assert f"padded: {slots}" in packed.narrow
    assert f"packed: 1 x {sum(batch):,} slots" in packed.narrow


def test_later_rows_of_a_step_win_and_validations_join_their_step(tmp_path) -> None:
    rows = [
        {"step": 2, "loss": 2.0},
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 3.0},
        {"step": 2, "validation_loss": 4.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    assert run.series("loss") == ([1, 2], [1.0, 3.0])
    assert run.series("validation_loss") == ([2], [4.0])


@pytest.mark.cases(quick="1.0", slow="0.3")
@pytest.mark.parametrize("share_right", [0.0, 0.3, 0.97, 1.0])
def test_sheet_mixes_tasks_and_shows_wrong_answers_in_their_share(share_right: float) -> None:
    rows = [row for row in answers(questions(600), share_right) if row.num_images]
    chosen = choose(rows)
    wrong = sum(not row.correct for row in chosen)
    in_all = sum(not row.correct for row in rows)
    assert len(chosen) == len(set(chosen)) == 24
    assert wrong == min(in_all, max(MIN_WRONG, round(24 * in_all / len(rows))))
    assert len({row.task for row in chosen}) == 4
    assert choose(rows[::-1]) == chosen


def test_sheet_of_few_answers_shows_all_of_them() -> None:
    rows = [row for row in answers(questions(7), 0.5) if row.num_images]
    assert sorted(row.key for row in choose(rows)) == sorted(row.key for row in rows)


def test_tables_agree_with_the_predictions(tmp_path) -> None:
    write_run(tmp_path, num_steps=4, num_questions=240, right_before=0.0, right_after=1.0)
    run = read_run(tmp_path)
    tables = {m: {row.name: row for row in rows} for m, rows in metric_tables(run).items()}
    assert list(tables) == ["exact_match", "characters"]
    total = tables["exact_match"]["all questions with images"]
    assert (total.counted, total.before, total.after) == ("220", "0.0%", "100.0%")
    assert tables["exact_match"]["text only, not counted above"].counted == "20"
    read = [row for row in run.after if row.task == "read"]
    counted = f"{sum(len(row.truth) for row in read):,}"
    assert {row.counted for row in tables["characters"].values()} == {counted}
    assert set(tables["characters"]) == {"read", "all questions with images"}
    values = {figure.name: figure.value for figure in headline(run)}
    assert values["exact match"] == values["characters"] == "100.0%"
    assert values["slots saved by packing"] == "48.1%"
    assert {"engine / attention", "versions / torch"} <= {name for name, _ in facts(run.result)}


def test_a_run_shows_the_metrics_that_it_was_scored_by(tmp_path) -> None:
    write_run(tmp_path, num_steps=4, num_questions=40)
    run = read_run(tmp_path)
    chosen = replace(run, result={**run.result, "metrics_after": {"characters": 0.5}})
    assert list(metric_tables(chosen)) == ["characters"]
    assert [figure.name for figure in headline(chosen)][:2] == [
        "characters",
        "slots saved by packing",
    ]


def test_a_programs_own_metric_has_a_table_too(tmp_path) -> None:
    """From result.json, since nobody can score by it again."""
    write_run(tmp_path, num_steps=4, num_questions=40)
    run = read_run(tmp_path)
    own = "python:neat"
    result = dict(run.result)
    for when, shares in (("before", (0.25, None)), ("after", (0.5, 0.75))):
        result[f"metrics_{when}"] = {**result[f"metrics_{when}"], own: shares[0]}
        tasks = {"read": {own: shares[1], "questions": 9}, "count": {own: 0.5, "questions": 8}}
        result[f"tasks_{when}"] = tasks
    tables = metric_tables(replace(run, result=result))
    assert list(tables) == ["exact_match", "characters", own]
    assert tables[own] == [
        ("read", "9", "", "75.0%"),
        ("count", "8", "50.0%", "50.0%"),
        ("all questions with images", "37", "25.0%", "50.0%"),
    ]


def test_summary_file_of_the_documented_form_is_read(tmp_path) -> None:
    written = data_summary()
    (tmp_path / "data-summary.json").write_text(json.dumps(written))
    data = read_run(tmp_path).data
    assert data is not None
    assert sum(data.lengths.values()) == sum(written["length_histogram"].values())
    assert len(data.micro_batches) == 12


def test_holes_in_micro_batches_are_not_drawn(tmp_path) -> None:
    written = data_summary()
    written["length_histogram"]["0"] = 3
    written["example_micro_batches"] = [[0, 0], [7, 0, 9]]
    (tmp_path / "data-summary.json").write_text(json.dumps(written))
    data = read_run(tmp_path).data
    assert data is not None
    assert data.micro_batches == ((7, 9),)
    assert 0 not in data.lengths


def test_what_packing_did_is_shown_by_its_spread() -> None:
    rows = metrics_rows(40)
    run = RunFiles(
        name="a",
        steps={row["step"]: row for row in rows},
        result={},
        data=None,
        before=None,
        after=None,
    )
    spread = {row.name.split(":")[0]: row for row in spread_rows(run)}
    samples = spread["samples per optimizer step"]
    assert (samples.low, samples.middle, samples.high) == ("12", "16", "20")
    assert spread["imbalance"].high == "1.080"
    assert spread["padding"].middle == "0.3%"
    alone = RunFiles(
        name="a",
        steps={1: {"step": 1, "imbalance": 1.0}},
        result={},
        data=None,
        before=None,
        after=None,
    )
    assert spread_rows(alone) == [], "one replica has no imbalance"
