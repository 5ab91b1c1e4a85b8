"""The images of a line of the row, as small as needed, over the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from vlmpack.report.inspect.canvas import MUTED, Canvas, Path, Text, Thumb
from vlmpack.report.inspect.row import Row

HEIGHT = 40.0
MIN_HEIGHT = 10.0
MAX_WIDTH = 120.0
SPACE = 2.0
LEAD = 7.0
"""Pixels between the images and the tokens, where a line leads from one to the other."""


class Window(Protocol):
    """A line of the row; see `lanes.Line`."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def left(self) -> float: ...
    def x(self, slot: float) -> float: ...


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image of the row.

    Args:
        image: its number in the row.
        begin, end: slots of its tokens.
        size: (width, height) in pixels.
    """

    image: int
    begin: int
    end: int
    size: tuple[int, int]


def image_spans(row: Row) -> Iterator[ImageSpan]:
    """All images of a row, in order."""
    image = 0
    for sample in row.shown.samples:
        slot, own = sample.start, 0
        for run in sample.runs:
            if run.kind == "image" and own < len(sample.images):
                yield ImageSpan(image + own, slot, slot + run.num_tokens, sample.images[own].size)
                own += 1
            slot += run.num_tokens
        image += len(sample.images)


def place_thumbs(canvas: Canvas, row: Row, line: Window) -> float | None:
    """Draw the images whose first token is in a line.

    Returns:
        Where they begin, or None where there is none.
    """
    spans = [span for span in image_spans(row) if line.begin <= span.begin < line.end]
    if not spans:
        return None
    top, right = canvas.height, canvas.width - 1
    shown, sizes = _fitting(spans, right - line.left)
    places = [line.x(span.begin) for span in shown]
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + sizes[k - 1][0] + SPACE)
    limit = right
    for k in reversed(range(len(places))):
        places[k] = min(places[k], limit - sizes[k][0])
        limit = places[k] - SPACE
    tallest = max(height for _, height in sizes)
    for span, x, (width, height) in zip(shown, places, sizes, strict=True):
        y = top + tallest - height
        canvas.add(Thumb(x=x, y=y, width=width, height=height, image=span.image))
        foot = min(max(line.x(span.begin), x + 1), x + width - 1)
        token = line.x(span.begin)
        canvas.add(
            Path(
                points=((foot, top + tallest + 1), (token, top + tallest + LEAD)),
                color=MUTED,
                width=0.8,
            )
        )
    canvas.height += tallest + LEAD
    if len(shown) < len(spans):
        note = f"{len(spans) - len(shown)} more images in this line"
        canvas.height += 12
        canvas.add(Text(x=line.left, y=canvas.height - 2, text=note, size=9, color=MUTED))
    return top


def _fitting(
    spans: list[ImageSpan], room: float
) -> tuple[list[ImageSpan], list[tuple[float, float]]]:
    """As many images as fit side by side, and their sizes."""
    sizes = [_size(span.size, HEIGHT) for span in spans]
    total = sum(width + SPACE for width, _ in sizes)
    shrink = min(1.0, room / total)
    if shrink * HEIGHT < MIN_HEIGHT:
        shrink = MIN_HEIGHT / HEIGHT
        kept, used = 0, 0.0
        while kept < len(sizes) and used + sizes[kept][0] * shrink + SPACE <= room:
            used += sizes[kept][0] * shrink + SPACE
            kept += 1
        spans, sizes = spans[: max(1, kept)], sizes[: max(1, kept)]
    return spans, [(width * shrink, height * shrink) for width, height in sizes]


def _size(size: tuple[int, int], height: float) -> tuple[float, float]:
    """Of a thumbnail: its proportions kept, inside the bounds."""
    scale = min(height / size[1], MAX_WIDTH / size[0])
    return max(2.0, size[0] * scale), max(2.0, size[1] * scale)
