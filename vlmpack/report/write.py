"""Run folder -> report/.

    report/
      index.html            one page with everything below inside
      loss.png
      lengths.png           if the run left a data summary
      samples.png           if test questions with images were answered
      images/               the images of the sheet, so that the report can be made again

What a run lacks is left out. The same files give the same report; images are kept because the test
shards may be elsewhere later.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlmpack.encode.decode import suffix_of
from vlmpack.errors import RunDirError, writing
from vlmpack.evaluation.metrics import METRICS, Group, Scores, score, written_metrics
from vlmpack.evaluation.predictions import Prediction, Question
from vlmpack.report.document import Section, percent, render
from vlmpack.report.run_files import RunFiles, read_run
from vlmpack.report.run_pictures import draw_lengths, draw_loss, lengths_pictures, loss_picture
from vlmpack.report.samples import (
    Images,
    about_steps,
    best_row,
    choose,
    draw_samples,
    followed,
    head,
    metric_rows,
    sample_cards,
)
from vlmpack.training.metrics import validations
from vlmpack.whole_file import regular_bytes, write_atomically
from vlmpack.words import duration


class Figure(NamedTuple):
    """One headline figure: what it is, its value, and what it is compared with."""

    name: str
    value: str
    note: str


class TaskRow(NamedTuple):
    """A metric of one group of questions, as text; `before` is "" where it is unknown."""

    name: str
    counted: str
    before: str
    after: str


_HIDDEN = {"identity", "tasks_before", "tasks_after", "validation_before", "validation_after"}
"""Fields of result.json that are shown otherwise or mean nothing to a reader."""


_UNSAID = ["exact_match", "characters"]
"""Metrics of answers beside which there is no result.json."""


def headline(run: RunFiles) -> list[Figure]:
    figures: list[Figure] = []
    before = written_metrics(run.result, "before")
    for name, value in written_metrics(run.result, "after").items():
        note = f"{percent(before[name])} before training" if name in before else ""
        figures.append(Figure(name.replace("_", " "), percent(value), note))
    first, last = _validated(run)
    for field, name in _SHARES.items():
        if field in first and field in last:
            note = f"{percent(first[field])} before training"
            figures.append(Figure(name, percent(last[field]), note))
    padded, real = run.number("padded_tokens"), run.number("real_tokens")
    computed = run.number("computed_tokens") or run.number("packed_tokens")
    if padded and computed:
        note = f"{computed:,.0f} computed instead of {padded:,.0f}"
        figures.append(Figure("slots saved by packing", percent(1 - computed / padded), note))
    speed = run.number("tokens_per_second")
    if speed is not None:
        note = "" if real is None else f"{real:,.0f} tokens trained, padding not counted"
        figures.append(Figure("real tokens per second", f"{speed:,.0f}", note))
    seconds, steps = run.number("train_seconds"), run.number("steps")
    if seconds is not None:
        note = "" if steps is None else f"{steps:,.0f} optimizer steps"
        figures.append(Figure("training time", duration(seconds), note))
    return figures


def metric_tables(run: RunFiles) -> dict[str, list[TaskRow]]:
    """A table a metric that counted something: by task, over all, then text-only questions.

    A program's own metrics come from result.json, without text-only questions.
    """
    if run.after is None:
        return {}
    written = run.result.get("metrics_after")
    names = [n for n in written if n in METRICS] if isinstance(written, Mapping) else _UNSAID
    metrics = {name: METRICS[name] for name in names}
    after = _groups(score(run.after, metrics))
    before = _groups(score(run.before, metrics)) if run.before is not None else {}
    scored = {
        name: [
            TaskRow(
                title,
                f"{group.tallies[name].counted:,}",
                _share(before[title], name) if title in before else "",
                _share(group, name),
            )
            for title, group in after.items()
            if group.tallies[name].counted
        ]
        for name in names
    }
    own = [name for name in written_metrics(run.result, "after") if name not in METRICS]
    return scored | {name: _own_rows(run, name) for name in own}


def _own_rows(run: RunFiles, name: str) -> list[TaskRow]:
    """A metric that cannot be computed again, from result.json."""
    rows = run.after or []
    images = [row for row in rows if row.num_images]
    over_all = "all questions with images" if images else "all questions"
    before, after = (
        {**(run.result.get(f"tasks_{when}") or {}), over_all: run.result.get(f"metrics_{when}")}
        for when in ("before", "after")
    )
    counted = {title: group["questions"] for title, group in after.items() if title != over_all}
    counted[over_all] = len(images or rows)
    return [
        TaskRow(title, f"{counted[title]:,}", _written(before.get(title), name), share)
        for title, group in after.items()
        if (share := _written(group, name))
    ]


def _written(shares: Mapping[str, Any] | None, name: str) -> str:
    share = (shares or {}).get(name)
    return percent(share) if isinstance(share, int | float) else ""


def _groups(scores: Scores) -> dict[str, Group]:
    """By their titles, in the order of a table."""
    if not scores.has_images:
        return {**scores.tasks, "all questions": scores.total}
    return {
        **scores.tasks,
        "all questions with images": scores.total,
        "text only, not counted above": scores.text_only,
    }


_SHARES = {
    "accuracy": "held-out pairs with a margin above 0",
    "chosen_likelier": "held-out pairs whose chosen answer is likelier",
}
"""Figures of a validation of pairs that are shares -> what they are of."""


class ValidationRow(NamedTuple):
    """A figure of validations, as text."""

    name: str
    before: str
    after: str


def validation_rows(run: RunFiles) -> list[ValidationRow]:
    """What validation found before the first step and at the end; empty without one of them."""
    first, last = _validated(run)
    return [
        ValidationRow(name.replace("_", " "), _text(first[name]), _text(last[name]))
        for name in first
        if name != "step" and name in last
    ]


def _validated(run: RunFiles) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The validation of step 0 and the last one; empty where there are not both."""
    rows = validations([*run.steps.values()])
    return (rows[0], rows[-1]) if len(rows) > 1 and rows[0]["step"] == 0 else ({}, {})


class SpreadRow(NamedTuple):
    """A figure of the steps, as text: its median and its ends."""

    name: str
    low: str
    middle: str
    high: str


def spread_rows(run: RunFiles) -> list[SpreadRow]:
    """What packing did, step by step; figures without meaning in this run are left out."""
    rows = []
    for field, name, form in _SPREADS:
        values = sorted(run.series(field)[1])
        if not values or (field == "imbalance" and values[-1] <= 1):
            continue
        ends_and_middle = (values[0], values[len(values) // 2], values[-1])
        rows.append(SpreadRow(name, *(format(value, form) for value in ends_and_middle)))
    return rows


_SPREADS = (
    ("fill", "fill: real tokens per computed slot", ".1%"),
    ("padding", "padding", ".1%"),
    ("tokens_per_second", "real tokens per second", ",.0f"),
    ("num_samples", "samples per optimizer step", ",.0f"),
    ("num_rows", "rows per optimizer step", ",.0f"),
    ("imbalance", "imbalance: slowest replica's planned cost over the mean", ".3f"),
    ("data_wait_share", "share of a step spent waiting for data", ".1%"),
)
"""(field of a step, its name, how its numbers are written)."""


def facts(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """result.json as (name, value), nested objects as `outer / inner`."""
    rows: list[tuple[str, str]] = []
    for name, value in result.items():
        if not prefix and name in _HIDDEN:
            continue
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            rows.extend(facts(value, f"{label} / "))
        elif value is not None:
            rows.append((label, _text(value)))
    return rows


def _share(group: Group, metric: str) -> str:
    share = group.shares[metric]
    return "" if share is None else percent(share)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def render_page(run: RunFiles, images: Images) -> str:
    """The page as HTML.

    Raises:
        CapabilityError: matplotlib is not installed.
    """
    right_of, cards = sample_cards(run, images)
    loss = loss_picture(run)
    model, finished = run.result.get("model"), run.result.get("finished")
    about = (
        f"finetuned from {model}" if model else "",
        f"finished {finished}" if finished else "",
        "" if run.result else "no result.json: the run is not finished",
    )
    return render(
        "run.html",
        title=run.name,
        about=", ".join(filter(None, about)),
        figures=headline(run),
        pictures=[*([loss] if loss else []), *lengths_pictures(run)],
        asked="; ".join(filter(None, head(run))),
        right_of=right_of,
        cards=cards,
        followed=followed(run, images),
        about_steps=about_steps(run),
        sections=[section for section in _sections(run) if section.rows],
    )


def _sections(run: RunFiles) -> Iterator[Section]:
    for metric, rows in metric_tables(run).items():
        title = f"{metric.replace('_', ' ').capitalize()} by task"
        yield Section.of_figures(title, ("task", "counted", "before", "after"), rows)
    heads, by_step = metric_rows(run)
    marked, line = best_row(run, by_step)
    said = [line] if line else []
    yield Section.of_figures("Metrics by step", heads, by_step, *said, marked=marked)
    yield Section.of_figures("Validation", ("figure", "before", "after"), validation_rows(run))
    spread = ("each step", "least", "median", "most")
    yield Section.of_figures("While training", spread, spread_rows(run))
    yield Section.of_figures("The run", ("", ""), facts(run.result), words=2)


SampleName = tuple[str, str]
"""(shard, key)."""


def write_report(run_dir: Path, test_samples: Iterable[Question] | None = None) -> Path:
    """Draw the pictures and write the page.

    Args:
        run_dir: a run folder; whatever it holds is shown, see `vlmpack.report.run_files`.
        test_samples: the questions, for their images. None: the images of an earlier report.

    Raises:
        RunDirError: nothing to report, a damaged file, or a folder that cannot be written.
        CapabilityError: matplotlib is not installed.
    """
    run = read_run(run_dir)
    folder = run_dir / "report"
    with writing(folder, RunDirError):
        folder.mkdir(exist_ok=True)
        images = _sheet_images(run, folder / "images", test_samples)
        drawn = {
            "loss.png": draw_loss(run),
            "lengths.png": draw_lengths(run),
            "samples.png": draw_samples(run, images),
        }
        for name, data in drawn.items():
            if data is None:
                (folder / name).unlink(missing_ok=True)
            else:
                write_atomically(folder / name, data)
        write_atomically(folder / "index.html", render_page(run, images))
    return folder


def _sheet_images(
    run: RunFiles, folder: Path, test_samples: Iterable[Question] | None
) -> dict[SampleName, Sequence[bytes]]:
    """Images of the questions on the sheet: from the questions, or kept by an earlier report."""
    chosen = choose([row for row in run.after or () if row.num_images])
    if test_samples is None:
        return {(row.shard, row.key): _kept(row, folder) for row in chosen}
    names = {(row.shard, row.key) for row in chosen}
    by_name = {
        (question.shard, question.key): question.images
        for question in test_samples
        if (question.shard, question.key) in names
    }
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if re.fullmatch(r"[0-9a-f]{16}-\d+\.\w+", old.name):
            old.unlink()
    for (shard, key), images in by_name.items():
        for index, data in enumerate(images):
            (folder / f"{_stem(shard, key)}-{index}.{suffix_of(data)}").write_bytes(data)
    return dict(by_name)


def _kept(row: Prediction, folder: Path) -> list[bytes]:
    stem = _stem(row.shard, row.key)
    paths = [path for i in range(row.num_images) for path in folder.glob(f"{stem}-{i}.*")]
    return [regular_bytes(path) for path in paths]


def _stem(shard: str, key: str) -> str:
    return hashlib.blake2b(f"{shard}\0{key}".encode(), digest_size=8).hexdigest()
