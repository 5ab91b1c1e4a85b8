"""Figures of answered questions, by the names that a recipe chooses.

A metric counts what is right in some predictions. A new one is a function here, a line in `METRICS`
and its name in `evaluation.metrics` of the recipe's schema.

Figures cover questions with images. Text-only questions are counted separately, since a model may
answer those without seeing anything. If no question has an image, figures cover all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from vlmpack.encode.coordinates import Read
from vlmpack.errors import ExtensionError
from vlmpack.evaluation.predictions import Prediction, Shapes
from vlmpack.handed_over import calling
from vlmpack.words import raised

NO_TASK = "(no task)"
"""The group of questions whose sample has no `task`."""

When = Literal["before", "after"]
"""Which side of training."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How much is right of what was counted."""

    right: float
    counted: int

    @property
    def share(self) -> float | None:
        """0 to 1; None where nothing was counted."""
        return self.right / self.counted if self.counted else None


Metric = Callable[[Sequence[Prediction]], Tally]


def exact_match(rows: Sequence[Prediction]) -> Tally:
    """Answers that are the true one once both are stripped."""
    return Tally(sum(row.correct for row in rows), len(rows))


def characters(rows: Sequence[Prediction]) -> Tally:
    """Characters that match the truth by place, of questions with task `read` or without a task."""
    pairs = [(row.truth.strip(), row.answer.strip()) for row in rows if row.task in (None, "read")]
    return Tally(
        sum(a == b for truth, answer in pairs for a, b in zip(truth, answer, strict=False)),
        sum(len(truth) for truth, _ in pairs),
    )


def contains(rows: Sequence[Prediction]) -> Tally:
    """Answers in which the true one stands, whatever the case of its letters."""
    hits = sum(row.truth.strip().casefold() in row.answer.casefold() for row in rows)
    return Tally(hits, len(rows))


def anls(rows: Sequence[Prediction]) -> Tally:
    """Average normalised Levenshtein similarity (1905.13648, section 4.2, one true answer).

    It is 1 - the edits over the length of the longer text, in lower case, and 0 if that is below
    0.5.
    """
    shares = [_similarity(row.truth.strip().lower(), row.answer.strip().lower()) for row in rows]
    return Tally(sum(share if share >= 0.5 else 0.0 for share in shares), len(rows))


def relaxed_accuracy(rows: Sequence[Prediction]) -> Tally:
    """ChartQA's (2203.10244, section 5.1): a number may be 5% off the true one, a text may not."""
    return Tally(sum(_is_close(row.truth, row.answer) for row in rows), len(rows))


def _similarity(one: str, other: str) -> float:
    """1 - Levenshtein distance / the longer length; 1 for two empty texts."""
    longest = max(len(one), len(other))
    before = list(range(len(other) + 1))
    for place, char in enumerate(one, 1):
        row = [place]
        for column, found in enumerate(other, 1):
            changed = before[column - 1] + (char != found)
            row.append(min(before[column] + 1, row[-1] + 1, changed))
        before = row
    return 1 - before[-1] / longest if longest else 1.0


def _is_close(truth: str, answer: str) -> bool:
    true, said = _number(truth), _number(answer)
    if true is None or said is None:
        return truth.strip().lower() == answer.strip().lower()
    return abs(said - true) <= 0.05 * abs(true)


def _number(text: str) -> float | None:
    text = text.strip()
    try:
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


POINT_DISTANCE = 0.05
"""How far an answer's point may be from the true one, in diagonals of the image."""


def box_iou(rows: Sequence[Prediction]) -> Tally:
    """Intersection over union, on average over true boxes. Boxes without a partner count as 0.

    True boxes and an answer's on the same image are paired, those that overlap most first. Text
    without a box in the form of the family's rule has none.
    """
    found = [_overlaps(row.shapes) for row in rows if row.shapes is not None]
    return Tally(sum(sum(x) for x, *_ in found), sum(max(sizes) for _, *sizes in found))


def box_f1(rows: Sequence[Prediction], threshold: float = 0.5) -> Tally:
    """F1 of boxes, paired as by `box_iou`. A pair is right if its overlap reaches the threshold."""
    found = [_overlaps(row.shapes) for row in rows if row.shapes is not None]
    right = sum(share >= threshold for shares, *_ in found for share in shares)
    return Tally(2 * right, sum(sum(sizes) for _, *sizes in found))


def point_accuracy(rows: Sequence[Prediction]) -> Tally:
    """True points that an answer has within POINT_DISTANCE; surplus ones are wrong."""
    found = [_near_points(row.shapes) for row in rows if row.shapes is not None]
    return Tally(sum(len(pairs) for pairs, *_ in found), sum(max(sizes) for _, *sizes in found))


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes (x1, y1, x2, y2). One without an area has none."""
    wide, high = (max(0.0, min(one[n + 2], other[n + 2]) - max(one[n], other[n])) for n in (0, 1))
    areas = ((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (one, other))
    return wide * high / (sum(areas) - wide * high) if wide * high else 0.0


def _overlaps(shapes: Shapes) -> tuple[list[float], int, int]:
    """Overlaps of pairs of boxes, and how many true and answered boxes there are."""
    return _paired(shapes, 5, lambda true, said: overlap(true[1:], said[1:]))


def _near_points(shapes: Shapes) -> tuple[list[float], int, int]:
    def nearness(true: Read, said: Read) -> float:
        diagonal = math.hypot(*shapes.images[int(true[0])][:2])
        return max(0.0, POINT_DISTANCE + 1e-9 - math.dist(true[1:], said[1:]) / diagonal)

    return _paired(shapes, 3, nearness)


def _paired(
    shapes: Shapes, size: int, how_near: Callable[[Read, Read], float]
) -> tuple[list[float], int, int]:
    """What pairs of shapes with so many numbers score above 0, each shape in one pair, the best
    first; and how many there are in the truth and in the answer."""
    truth, said = ([x for x in of if len(x) == size] for of in (shapes.truth, shapes.answer))
    pairs = (
        (how_near(a, b), m, n)
        for m, a in enumerate(truth)
        for n, b in enumerate(said)
        if a[0] == b[0]
    )
    scores: list[float] = []
    taken: set[tuple[str, int]] = set()
    for score, m, n in sorted(pairs, reverse=True):
        if score > 0 and not taken & (both := {("true", m), ("said", n)}):
            scores.append(score)
            taken |= both
    return scores, len(truth), len(said)


METRICS: Mapping[str, Metric] = {
    "exact_match": exact_match,
    "characters": characters,
    "contains": contains,
    "anls": anls,
    "relaxed_accuracy": relaxed_accuracy,
    "box_iou": box_iou,
    "box_f1": box_f1,
    "box_f1_75": partial(box_f1, threshold=0.75),
    "point_accuracy": point_accuracy,
}


def checked_metric(metric: Callable[[Sequence[Prediction]], Any], name: str) -> Metric:
    """A program's metric, whose errors give its name.

    Args:
        metric: predictions -> a share from 0 to 1, a Tally, or None if nothing can be counted.
    """

    def fault(error: BaseException) -> ExtensionError:
        return ExtensionError(f"metric {name} {raised(error)}")

    def call(rows: Sequence[Prediction]) -> Tally:
        if not rows:
            return Tally(0, 0)
        with calling(f"metric {name}", fault):
            tally = metric(list(rows))  # its own, to sort or to empty: others count these rows too
        if tally is None:
            return Tally(0, 0)
        if isinstance(tally, Tally):
            share = tally.share
            if share is None or 0 <= share <= 1:
                return tally
        elif isinstance(tally, int | float) and not isinstance(tally, bool) and 0 <= tally <= 1:
            return Tally(float(tally) * len(rows), len(rows))
        shown = repr(tally)[:100]
        raise ExtensionError(
            f"metric {name} returned {shown}. Expected a share from 0 to 1, a vlmpack Tally, or "
            "None where there is nothing to count"
        )

    return call


@dataclass(frozen=True, slots=True)
class Group:
    """Some questions, and what their answers score by each metric."""

    num_questions: int
    tallies: Mapping[str, Tally]

    @property
    def shares(self) -> dict[str, float | None]:
        """The figures, 0 to 1."""
        return {name: tally.share for name, tally in self.tallies.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Figures of one set of predictions.

    Args:
        has_images: whether any question has an image; `total` and `tasks` are over those then.
        text_only: questions without images.
    """

    has_images: bool
    total: Group
    tasks: Mapping[str, Group]
    text_only: Group


def score(predictions: Iterable[Prediction], metrics: Mapping[str, Metric] = METRICS) -> Scores:
    """Score predictions by each of some metrics.

    Raises:
        ExtensionError: a program's metric raised, or returned no share.
    """
    rows = list(predictions)

    def group(of: Sequence[Prediction]) -> Group:
        return Group(len(of), {name: metric(of) for name, metric in metrics.items()})

    images = [row for row in rows if row.num_images]
    shown = images or rows
    tasks = sorted({row.task or NO_TASK for row in shown})
    return Scores(
        has_images=bool(images),
        total=group(shown),
        tasks={
            task: group([row for row in shown if (row.task or NO_TASK) == task]) for task in tasks
        },
        text_only=group([row for row in rows if not row.num_images]),
    )


def written_metrics(result: Mapping[str, Any], when: When) -> dict[str, float]:
    """The figures in a result.json."""
    metrics = result.get(f"metrics_{when}")
    return {
        name: value
        for name, value in (metrics.items() if isinstance(metrics, Mapping) else ())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
