"""The figures of the page, as plain rows of text. What a run lacks is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vlmpack.evaluation.metrics import (
    METRICS,
    Group,
    Scores,
    score,
    written_metrics,
)
from vlmpack.report.run_files import RunFiles
from vlmpack.report.text import percent
from vlmpack.training.metrics import validations
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
    found = validations([*run.steps.values()])
    return (found[0], found[-1]) if len(found) > 1 and found[0]["step"] == 0 else ({}, {})


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
