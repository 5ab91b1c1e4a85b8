"""samples.png: a sheet of test questions with their images, the model's answers and the truth."""

from __future__ import annotations

import hashlib
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vlmpack.evaluation.metrics import NO_TASK
from vlmpack.evaluation.predictions import Prediction
from vlmpack.report.style import (
    FAINT,
    GREEN,
    INK,
    LARGE,
    MUTED,
    NORMAL,
    RED,
    SMALL,
    WIDTH_INCHES,
    figure,
    one_line,
    percent,
    save_png,
    shorten,
)

MAX_CELLS = 24
COLUMNS = 4
MIN_WRONG = 3
"""Wrong answers shown at least, if there are that many; beyond it they get their true share."""

CELL_HEIGHT = 1.78
IMAGE_HEIGHT = 0.74
MARGIN = 0.2
GAP = 0.12
HEAD = 0.62
QUESTION_LINES = 3
QUESTION_CHARACTERS = 29
ANSWER_CHARACTERS = 22
"""Sizes in inches. The text limits fit the cell's width in ordinary text; wider text is clipped."""

MAX_ENLARGEMENT = 3.0
"""Display pixels (of 100 an inch) for one pixel of a small image, at most."""

Images = Mapping[tuple[str, str], Sequence[bytes]]
"""(shard, key) of a sample -> its encoded images."""


def choose(predictions: Sequence[Prediction], count: int = MAX_CELLS) -> list[Prediction]:
    """A fixed, mixed choice: right and wrong answers in their true proportion (but some wrong ones
    in any case), and every task in turn. The order of the test split plays no role.
    """
    wrong = _mixed([row for row in predictions if not row.correct])
    right = _mixed([row for row in predictions if row.correct])
    share = round(count * len(wrong) / max(1, len(predictions)))
    num_wrong = min(len(wrong), max(MIN_WRONG, share, count - len(right)))
    chosen = wrong[:num_wrong] + right[: count - num_wrong]
    return sorted(chosen, key=_lot)


def draw_samples(predictions: Sequence[Prediction], images: Images, path: Path) -> bool:
    """Draw the sheet.

    Args:
        predictions: answers to the test questions, those without images are passed over.
        images: of at least the chosen ones; a question whose images are missing says so.
        path: where to write.

    Returns:
        False, and no file, where there is no question with an image.
    """
    shown = [row for row in predictions if row.num_images]
    if not shown:
        return False
    cells = choose(shown)
    columns = min(COLUMNS, len(cells))
    rows = -(-len(cells) // columns)
    height = HEAD + rows * CELL_HEIGHT + 0.08
    width = (WIDTH_INCHES - 2 * MARGIN) / COLUMNS
    with figure(height) as drawing:
        _draw_head(drawing, shown, cells, height)
        for place, row in enumerate(cells):
            left = MARGIN + place % columns * width
            top = height - HEAD - place // columns * CELL_HEIGHT
            cell = _Cell(drawing, left, top, width - GAP, height)
            cell.draw(row, images.get((row.shard, row.key), ()))
        save_png(drawing, path)
    return True


def _lot(row: Prediction) -> bytes:
    """The same draw wherever the shards lie."""
    shard = row.shard.rpartition("/")[2]
    return hashlib.blake2b(f"{shard}\0{row.key}".encode(), digest_size=8).digest()


def _mixed(rows: Sequence[Prediction]) -> list[Prediction]:
    """Tasks take turns; within a task and its number of images, by lot."""
    groups: dict[str, list[Prediction]] = {}
    for row in sorted(rows, key=_lot):
        groups.setdefault(row.task or NO_TASK, []).append(row)
    queues = [groups[name] for name in sorted(groups)]
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _draw_head(
    drawing: Any, shown: Sequence[Prediction], cells: Sequence[Prediction], height: float
) -> None:
    num_right = sum(row.correct for row in shown)
    x, y = MARGIN / WIDTH_INCHES, 1 - 0.28 / height
    drawing.text(x, y, "Unseen test questions after training", fontsize=LARGE, weight="bold")
    wrong_here = sum(not row.correct for row in cells)
    text = (
        f"{num_right:,} of {len(shown):,} right ({percent(num_right / len(shown))}); "
        f"here {len(cells) - wrong_here} right and {wrong_here} wrong ones"
    )
    drawing.text(1 - x - GAP / WIDTH_INCHES, y, text, fontsize=SMALL, color=MUTED, ha="right")


@dataclass(frozen=True, slots=True)
class _Cell:
    """One question. Positions are inches from the left and top of the figure."""

    drawing: Any
    left: float
    top: float
    width: float
    figure_height: float

    def draw(self, row: Prediction, images: Sequence[bytes]) -> None:
        """Rule, images, question, answer."""
        from matplotlib.lines import Line2D

        y = 1 - (self.top_offset(0.0)) / self.figure_height
        ends = [self.left / WIDTH_INCHES, (self.left + self.width) / WIDTH_INCHES]
        self.drawing.add_artist(Line2D(ends, [y, y], color=FAINT, linewidth=0.8))
        decoded = [_decode(data) for data in images]
        if row.num_images and decoded and all(decoded):
            self.images([image for image in decoded if image is not None])
        else:
            self.text(0.36, "(image not available)", color=MUTED)
        question = textwrap.wrap(one_line(row.question), QUESTION_CHARACTERS) or [""]
        if len(question) > QUESTION_LINES:
            rest = " ".join(question[QUESTION_LINES - 1 :])
            question[QUESTION_LINES - 1 :] = [shorten(rest, QUESTION_CHARACTERS)]
        for number, line in enumerate(question):
            self.text(IMAGE_HEIGHT + 0.27 + 0.16 * number, line, color=MUTED)
        at = IMAGE_HEIGHT + 0.27 + 0.16 * len(question) + 0.05
        sign, colour = ("\u2713", GREEN) if row.correct else ("\u2717", RED)
        answer = shorten(one_line(row.answer), ANSWER_CHARACTERS) or "(nothing)"
        self.text(at, f"{sign} {answer}", color=colour, size=NORMAL, weight="bold")
        if not row.correct:
            truth = shorten(one_line(row.truth), ANSWER_CHARACTERS)
            self.text(at + 0.17, f"truth {truth}", color=INK, size=SMALL, indent=0.15)

    def top_offset(self, down: float) -> float:
        """Inches from the figure's top."""
        return self.figure_height - self.top + down

    def text(
        self,
        down: float,
        text: str,
        *,
        color: str,
        size: float = SMALL,
        weight: str = "normal",
        indent: float = 0.0,
    ) -> None:
        """A line whose baseline lies `down` inches below the cell's top."""
        x = (self.left + indent) / WIDTH_INCHES
        y = 1 - self.top_offset(down) / self.figure_height
        written = self.drawing.text(x, y, text, fontsize=size, color=color, weight=weight)
        written.set_clip_box(self.clip_box())
        written.set_clip_on(True)

    def clip_box(self) -> Any:
        """The cell, as matplotlib clips to it."""
        from matplotlib.transforms import Bbox, TransformedBbox

        left, width = self.left / WIDTH_INCHES, self.width / WIDTH_INCHES
        bottom = 1 - self.top_offset(CELL_HEIGHT) / self.figure_height
        inner = Bbox.from_bounds(left, bottom, width, CELL_HEIGHT / self.figure_height)
        return TransformedBbox(inner, self.drawing.transFigure)

    def images(self, images: Sequence[Image.Image]) -> None:
        """All images of the question, one below the other, at one scale."""
        gap = 0.05
        room = IMAGE_HEIGHT - gap * (len(images) - 1)
        tall = sum(image.height for image in images)
        wide = max(image.width for image in images)
        scale = min(room / tall, self.width / wide, MAX_ENLARGEMENT / 100)
        down = 0.1 + (IMAGE_HEIGHT - scale * tall - gap * (len(images) - 1)) / 2
        for image in images:
            width, height = scale * image.width, scale * image.height
            bottom = 1 - self.top_offset(down + height) / self.figure_height
            axes = self.drawing.add_axes(
                (
                    self.left / WIDTH_INCHES,
                    bottom,
                    width / WIDTH_INCHES,
                    height / self.figure_height,
                )
            )
            axes.imshow(image, interpolation="bicubic" if scale > 0.01 else "antialiased")
            axes.axis("off")
            down += height + gap


def _decode(data: bytes) -> Image.Image | None:
    """RGB, or None for an image that cannot be read: the sheet shows what it can."""
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
