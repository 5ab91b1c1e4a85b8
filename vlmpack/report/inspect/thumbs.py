"""The images of a line of the row, as small as needed, over the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from vlmpack.proof.rows.opening import ShownRow
from vlmpack.report.inspect.canvas import MUTED, Canvas, Path, Text, Thumb
from vlmpack.report.inspect.lines import Line

HEIGHT = 40.0
MIN_SHRINK = 0.25
MIN_WIDTH, MAX_WIDTH = 44.0, 130.0
"""Bounds on an image at full height, which ends where the next one begins if these let it."""
SPACE = 2.0
LEAD = 7.0
"""Pixels between the images and the tokens, where a line leads from one to the other."""


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


def image_spans(row: ShownRow) -> Iterator[ImageSpan]:
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


def place_thumbs(canvas: Canvas, row: ShownRow, line: Line) -> float | None:
    """Draw the images whose first token is in a line.

    Returns:
        Where they begin, or None where there is none.
    """
    spans = [span for span in image_spans(row) if line.begin <= span.begin < line.end]
    if not spans:
        return None
    top, right = canvas.height, canvas.width - 1
    sizes = _fitting(_sizes(spans, line, right), right - line.left)
    shown = spans[: len(sizes)]
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
        canvas.add(Text(x=line.left, y=canvas.height - 2, text=note, size=10, color=MUTED))
    return top


def _sizes(spans: list[ImageSpan], line: Line, right: float) -> list[tuple[float, float]]:
    """Each image as large as the next one's place lets it be; the last may move to the left."""
    starts = [line.x(span.begin) for span in spans]
    sizes: list[tuple[float, float]] = []
    for span, (start, after) in zip(spans, pairwise([*starts, right]), strict=True):
        room = after - start - SPACE
        if len(sizes) + 1 == len(spans):
            room = right - (starts[-2] + sizes[-1][0] + SPACE if sizes else line.left)
        sizes.append(_size(span.size, room))
    return sizes


def _fitting(sizes: list[tuple[float, float]], room: float) -> list[tuple[float, float]]:
    """As many images as fit side by side, smaller if need be."""
    total = sum(width + SPACE for width, _ in sizes)
    shrink = max(MIN_SHRINK, min(1.0, room / total))
    kept, used = 0, 0.0
    while kept < len(sizes) and used + sizes[kept][0] * shrink <= room:
        used += sizes[kept][0] * shrink + SPACE
        kept += 1
    return [(width * shrink, height * shrink) for width, height in sizes[: max(1, kept)]]


def _size(size: tuple[int, int], room: float) -> tuple[float, float]:
    """Width and height of a thumbnail: its proportions kept, inside the bounds."""
    widest = min(MAX_WIDTH, max(MIN_WIDTH, room))
    scale = min(HEIGHT / size[1], widest / size[0])
    return max(2.0, size[0] * scale), max(2.0, size[1] * scale)
