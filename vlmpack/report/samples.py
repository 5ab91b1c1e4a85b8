"""Test questions with their images and answers: `samples.png`, and the same by step in the page."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from PIL import Image

from vlmpack.errors import DataError
from vlmpack.evaluation.metrics import NO_TASK, box_iou, point_accuracy, written_metrics
from vlmpack.evaluation.predictions import Prediction
from vlmpack.report.document import (
    FAINT,
    GREEN,
    INK,
    LARGE,
    MUTED,
    NORMAL,
    RED,
    SMALL,
    WIDTH_INCHES,
    decode,
    figure,
    one_line,
    percent,
    png,
    shorten,
    thumbnails,
)
from vlmpack.report.run_files import RunFiles
from vlmpack.training.metrics import answered
from vlmpack.words import counted

MAX_CELLS = 24
COLUMNS = 4
MIN_WRONG = 3
"""Wrong answers shown at least, if there are that many; beyond it they get their true share."""

CELL_HEIGHT = 1.78
IMAGE_HEIGHT = 0.74
MARGIN = 0.2
GAP = 0.12
CELL_WIDTH = (WIDTH_INCHES - 2 * MARGIN) / COLUMNS - GAP
HEAD = 0.62
QUESTION_LINES = 3
QUESTION_CHARACTERS = 29
ANSWER_CHARACTERS = 22
"""Sizes in inches. The text limits fit the cell's width in ordinary text; wider text is clipped."""

MAX_ENLARGEMENT = 3.0
"""Display pixels (of 100 an inch) for one pixel of a small image, at most."""

MAX_SHOWN = 300
"""Characters of a question or an answer in the page."""

MAX_SIDE = 320
"""Pixels of an image in the page."""

Images = Mapping[tuple[str, str], Sequence[bytes]]
"""(shard, key) of a sample -> its encoded images."""


class Card(NamedTuple):
    """A test question as the page shows it.

    Args:
        images: their addresses; none where one is missing or cannot be read.
    """

    images: tuple[str, ...]
    question: str
    answer: str
    truth: str
    correct: bool


def head(run: RunFiles) -> tuple[str, str]:
    """What is shown, and other uses of the questions."""
    whose = "Unseen test" if run.seen == "" else "Test"
    return f"{whose} questions after training", run.seen or ""


def sample_cards(run: RunFiles, images: Images) -> tuple[str, list[Card]]:
    """What the sheet shows, for the page: how many are right, and a card a question."""
    shown = [row for row in run.after or () if row.num_images]
    chosen = choose(shown)
    cards = [
        Card(
            thumbnails(pictures(row, images), MAX_SIDE),
            shorten(one_line(row.question), MAX_SHOWN),
            _answer(row),
            shorten(one_line(row.truth), MAX_SHOWN),
            is_right(row),
        )
        for row in chosen
    ]
    return _right_of(shown, chosen) if shown else "", cards


def is_right(row: Prediction) -> bool:
    """Whether an answer is the true one, or finds what that says where: boxes by an overlap of 0.5
    on average, all points."""
    share = _found(row)
    return row.correct if share is None else share >= (0.5 if box_iou([row]).counted else 1)


def _found(row: Prediction) -> float | None:
    """The overlap of boxes, else the share of points; None where the question has none."""
    share = box_iou([row]).share
    return point_accuracy([row]).share if share is None else share


def pictures(row: Prediction, images: Images) -> list[Image.Image | None]:
    """The question's images, None where one cannot be read. With boxes and points they are as the
    model sees them, the truth and the answer drawn on them."""
    files = images.get((row.shard, row.key), ())
    try:
        if row.shapes is not None:
            return [row.shapes.on(number, data) for number, data in enumerate(files)]
    except (DataError, IndexError):  # other images than the answers are about
        pass
    return [decode(data) for data in files]


def choose(predictions: Sequence[Prediction], count: int = MAX_CELLS) -> list[Prediction]:
    """A fixed, mixed choice of questions.

    Right and wrong answers keep their true proportion, with some wrong ones in any case. Tasks take
    turns. The order of the test split plays no role.
    """
    wrong = _mixed([row for row in predictions if not is_right(row)])
    right = _mixed([row for row in predictions if is_right(row)])
    share = round(count * len(wrong) / max(1, len(predictions)))
    num_wrong = min(len(wrong), max(MIN_WRONG, share, count - len(right)))
    chosen = wrong[:num_wrong] + right[: count - num_wrong]
    return sorted(chosen, key=_lot)


def draw_samples(run: RunFiles, images: Images) -> bytes | None:
    """The sheet; None where there is no question with an image.

    Args:
        run: the run's files; answers to questions without images are passed over.
        images: of at least the chosen ones; a question whose images are missing says so.
    """
    shown = [row for row in run.after or () if row.num_images]
    if not shown:
        return None
    cells = choose(shown)
    columns = min(COLUMNS, len(cells))
    height = HEAD + -(-len(cells) // columns) * CELL_HEIGHT + 0.08
    with figure(height) as drawing:
        _draw_head(drawing, run, _right_of(shown, cells), height)
        for place, row in enumerate(cells):
            left = MARGIN + place % columns * (CELL_WIDTH + GAP)
            bottom = height - HEAD - (place // columns + 1) * CELL_HEIGHT
            inches = (left, bottom, CELL_WIDTH, CELL_HEIGHT)
            sides = (WIDTH_INCHES, height, WIDTH_INCHES, height)
            axes = drawing.add_axes([a / b for a, b in zip(inches, sides, strict=True)])
            _draw_cell(axes, row, pictures(row, images))
        return png(drawing)


def _lot(row: Prediction) -> bytes:
    """A draw that does not depend on where the shards lie."""
    shard = row.shard.rpartition("/")[2]
    return hashlib.blake2b(f"{shard}\0{row.key}".encode(), digest_size=8).digest()


def _mixed(rows: Sequence[Prediction]) -> list[Prediction]:
    """Tasks take turns; within a task and its number of images, by lot."""
    groups: dict[str, list[Prediction]] = {}
    for row in sorted(rows, key=_lot):
        groups.setdefault(row.task or NO_TASK, []).append(row)
    turns = zip_longest(*(groups[name] for name in sorted(groups)))
    return [row for turn in turns for row in turn if row is not None]


def _draw_head(drawing: Any, run: RunFiles, right_of: str, height: float) -> None:
    x, y = MARGIN / WIDTH_INCHES, 1 - 0.28 / height
    title, note = head(run)
    drawing.text(x, y, title, fontsize=LARGE, weight="bold")
    drawing.text(x, 1 - 0.46 / height, note, fontsize=SMALL, color=MUTED)
    drawing.text(1 - x - GAP / WIDTH_INCHES, y, right_of, fontsize=SMALL, color=MUTED, ha="right")


def _right_of(shown: Sequence[Prediction], cells: Sequence[Prediction]) -> str:
    """How many of all questions with images are right, and how many of those that are shown."""
    num_right, wrong_here = (
        sum(map(is_right, shown)),
        sum(not is_right(row) for row in cells),
    )
    return (
        f"{num_right:,} of {len(shown):,} right ({percent(num_right / len(shown))}); "
        f"here {len(cells) - wrong_here} right and {wrong_here} wrong ones"
    )


def _draw_cell(axes: Any, row: Prediction, images: Sequence[Image.Image | None]) -> None:
    """Draw one question in its cell; positions are inches from the cell's left and top."""
    axes.set(xlim=(0, CELL_WIDTH), ylim=(CELL_HEIGHT, 0))
    axes.axis("off")
    axes.axhline(0, color=FAINT, linewidth=0.8, clip_on=False)
    write = partial(axes.text, fontsize=SMALL, clip_on=True)
    decoded = [image for image in images if image is not None]
    if decoded and len(decoded) == len(images):
        _draw_images(axes, decoded)
    else:
        write(0, 0.36, "(image not available)", color=MUTED)
    question = textwrap.wrap(one_line(row.question), QUESTION_CHARACTERS) or [""]
    if len(question) > QUESTION_LINES:
        rest = " ".join(question[QUESTION_LINES - 1 :])
        question[QUESTION_LINES - 1 :] = [shorten(rest, QUESTION_CHARACTERS)]
    down = IMAGE_HEIGHT + 0.27
    for line in question:
        write(0, down, line, color=MUTED)
        down += 0.16
    down += 0.05
    sign, colour = ("\u2713", GREEN) if is_right(row) else ("\u2717", RED)
    answer = _answer(row, ANSWER_CHARACTERS)
    write(0, down, f"{sign} {answer}", color=colour, fontsize=NORMAL, weight="bold")
    if not row.correct:
        truth = shorten(one_line(row.truth), ANSWER_CHARACTERS)
        write(0.15, down + 0.17, f"truth {truth}", color=INK)


def _draw_images(axes: Any, images: Sequence[Image.Image]) -> None:
    gap = 0.05
    room = IMAGE_HEIGHT - gap * (len(images) - 1)
    tall = sum(image.height for image in images)
    wide = max(image.width for image in images)
    scale = min(room / tall, CELL_WIDTH / wide, MAX_ENLARGEMENT / 100)
    down = 0.1 + (room - scale * tall) / 2
    for image in images:
        bottom = down + scale * image.height
        axes.imshow(
            image, extent=(0, scale * image.width, bottom, down), aspect="auto",
            interpolation="bicubic" if scale > 0.01 else "antialiased",
        )  # fmt: skip
        down = bottom + gap


MAX_QUESTIONS = 6
MAX_STEPS = 8
"""Steps with answers that are shown, at even distances; the best one is added."""


class Said(NamedTuple):
    when: str
    answer: str
    correct: bool


class Followed(NamedTuple):
    """A question and its answers by step."""

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
            thumbnails(pictures(row, images), MAX_SIDE),
            tuple(
                Said(when, _answer(rows[row.shard, row.key]), is_right(rows[row.shard, row.key]))
                for when, rows in by_name
                if (row.shard, row.key) in rows
            ),
        )
        for row in chosen[:MAX_QUESTIONS]
    ]


def metric_rows(run: RunFiles) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the metrics by step; no rows without answers on the way."""
    answers = {step: shares for step, row in run.steps.items() if (shares := answered(row))}
    names = list(dict.fromkeys(name for row in answers.values() for name in row))
    before = written_metrics(run.result, "before")
    rows = [("before", *(_metric(before, name) for name in names))] if answers and before else []
    rows += [
        (f"step {step:,}", *(_metric(row, name) for name in names)) for step, row in answers.items()
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
    """The steps whose answers are shown: some at even distances, and the best one."""
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


def _answer(row: Prediction, limit: int = MAX_SHOWN) -> str:
    share, found = _found(row), ""
    if share is not None:
        found = f", {share:.2f}" if row.shapes and row.shapes.answer else ", no shape"
    return (shorten(one_line(row.answer), limit - len(found)) or "(nothing)") + found


def _metric(row: Mapping[str, float], name: str) -> str:
    return percent(row[name]) if name in row else ""
