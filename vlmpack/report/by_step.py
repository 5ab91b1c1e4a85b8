"""Answers to the same test questions, before training, on the way and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vlmpack.evaluation.metrics import written_metrics
from vlmpack.evaluation.predictions import Prediction
from vlmpack.report.run_files import RunFiles
from vlmpack.report.samples_picture import MAX_SHOWN, MAX_SIDE, Images, choose
from vlmpack.report.style import one_line, percent, shorten
from vlmpack.report.thumbnail import thumbnails
from vlmpack.training.metrics import answered
from vlmpack.words import counted

MAX_QUESTIONS = 6
MAX_STEPS = 8
"""How many steps with answers are shown, at even distances; the best one is shown beside them."""


class Said(NamedTuple):
    """An answer of one step."""

    when: str
    answer: str
    correct: bool


class Followed(NamedTuple):
    """A question and what was answered.

    Args:
        question: on one line.
        truth: the true answer.
        images: their addresses.
        said: by step.
    """

    question: str
    truth: str
    images: tuple[str, ...]
    said: tuple[Said, ...]


def followed(run: RunFiles, images: Images) -> list[Followed]:
    """Some questions with their answers by step; empty for a run without answers on the way."""
    times = _times(run)
    if len(times) < 2 or not run.on_the_way:
        return []
    latest = times[-1][1]
    chosen = choose([row for row in latest if row.num_images], MAX_QUESTIONS) or latest
    by_name = [(when, {(row.shard, row.key): row for row in rows}) for when, rows in times]
    return [
        Followed(
            shorten(one_line(row.question), MAX_SHOWN),
            shorten(one_line(row.truth), MAX_SHOWN),
            thumbnails(images.get((row.shard, row.key), ()), MAX_SIDE),
            tuple(
                Said(when, _answer(rows[row.shard, row.key]), rows[row.shard, row.key].correct)
                for when, rows in by_name
                if (row.shard, row.key) in rows
            ),
        )
        for row in chosen[:MAX_QUESTIONS]
    ]


def metric_rows(run: RunFiles) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the metrics by step; no rows without answers on the way."""
    found = {step: shares for step, row in run.steps.items() if (shares := answered(row))}
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    before = written_metrics(run.result, "before")
    rows = [("before", *(_share(before, name) for name in names))] if found and before else []
    rows += [
        (f"step {step:,}", *(_share(row, name) for name in names)) for step, row in found.items()
    ]
    return ("answers", *(name.replace("_", " ") for name in names)), rows


def about_steps(run: RunFiles) -> str:
    """How many steps `followed` leaves out, and what its best one is the best by."""
    shown = _shown_steps(run)
    left_out, steps = len(run.on_the_way) - len(shown), counted(len(run.on_the_way), "step")
    said = [f"left out: {left_out:,} of {steps}"] if left_out else []
    if run.best is not None and run.best.step in shown:
        said.append(f"best: by {run.best.figure.replace('_', ' ')}")
    return "; ".join(said)


def best_row(run: RunFiles, rows: Sequence[tuple[str, ...]]) -> tuple[tuple[int, ...], str]:
    """The place of the best step among the rows of `metric_rows`, and a line that names it."""
    if run.best is None:
        return (), ""
    name = f"step {run.best.step:,}"
    marked = tuple(place for place, row in enumerate(rows) if row[0] == name)
    return marked, f"best: {name}, by {run.best.figure.replace('_', ' ')}" if marked else ""


def _shown_steps(run: RunFiles) -> list[int]:
    steps = sorted(run.on_the_way)
    if len(steps) <= MAX_STEPS:
        return steps
    shown = {steps[round(n * (len(steps) - 1) / (MAX_STEPS - 1))] for n in range(MAX_STEPS)}
    if run.best is not None and run.best.step in run.on_the_way:
        shown.add(run.best.step)
    return sorted(shown)


def _times(run: RunFiles) -> list[tuple[str, Sequence[Prediction]]]:
    before = [("before", run.before)] if run.before else []
    best = run.best.step if run.best is not None else None
    return [
        *before,
        *(
            (f"step {step:,}{', best' if step == best else ''}", run.on_the_way[step])
            for step in _shown_steps(run)
        ),
    ]


def _answer(row: Prediction) -> str:
    return shorten(one_line(row.answer), MAX_SHOWN) or "(nothing)"


def _share(row: Mapping[str, float], name: str) -> str:
    return percent(row[name]) if name in row else ""
