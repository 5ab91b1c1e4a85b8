"""A drawing as a PNG, with twice its size in pixels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path as FilePath

from PIL import Image, ImageDraw

from vlmpack.report.inspect.canvas import Canvas, Path, Rect, Text, font

SCALE = 2
HATCH_STEP = 4.0
DASH, SPACE = 3.0, 2.0
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def draw_png(canvas: Canvas, images: Sequence[Image.Image]) -> Image.Image:
    """The drawing as an RGB image.

    Args:
        canvas: the drawing.
        images: the row's, by number.
    """
    size = (round(canvas.width * SCALE), round(canvas.height * SCALE))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for shape in canvas.shapes:
        if isinstance(shape, Rect):
            _rect(sheet, pen, shape)
        elif isinstance(shape, Path):
            _path(pen, shape)
        elif isinstance(shape, Text):
            at = (shape.x * SCALE, shape.y * SCALE)
            thick = 0.5 if shape.bold else 0
            pen.text(
                at,
                shape.text,
                shape.color,
                font(shape.size * SCALE),
                ANCHORS[shape.anchor],
                stroke_width=thick,
            )
        else:
            box = _box(shape.x, shape.y, shape.width, shape.height)
            width, height = box[2] - box[0], box[3] - box[1]
            sheet.paste(_resized(images[shape.image], width, height), box[:2])
    return sheet


def write_png(image: Image.Image, path: FilePath) -> None:
    """Write an image; the file appears whole or not at all."""
    data = BytesIO()
    image.save(data, "PNG")
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    partial.write_bytes(data.getvalue())
    partial.replace(path)


def _box(x: float, y: float, width: float, height: float) -> tuple[int, int, int, int]:
    """Neighbours share an edge; nothing is thinner than a pixel."""
    left, top = round(x * SCALE), round(y * SCALE)
    right, bottom = round((x + width) * SCALE), round((y + height) * SCALE)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _rect(sheet: Image.Image, pen: ImageDraw.ImageDraw, shape: Rect) -> None:
    left, top, right, bottom = _box(shape.x, shape.y, shape.width, shape.height)
    pen.rectangle((left, top, right - 1, bottom - 1), fill=shape.fill)
    if shape.hatch is None:
        return
    width, height = right - left, bottom - top
    tile = Image.new("RGB", (width, height), shape.fill)
    lines = ImageDraw.Draw(tile)
    step = round(HATCH_STEP * SCALE)
    first = -((left + bottom) % step) - height
    for x in range(first, width + height, step):
        lines.line((x, height, x + height, 0), fill=shape.hatch, width=SCALE)
    sheet.paste(tile, (left, top))


def _path(pen: ImageDraw.ImageDraw, shape: Path) -> None:
    points = [(x * SCALE, y * SCALE) for x, y in shape.points]
    width = max(1, round(shape.width * SCALE))
    if not shape.dashed:
        pen.line(points, fill=shape.color, width=width, joint="curve")
        return
    for (x1, y1), (x2, y2) in pairwise(points):
        length = max(abs(x2 - x1), abs(y2 - y1))
        at = 0.0
        while at < length:
            end = min(length, at + DASH * SCALE)
            ends = [(x1 + (x2 - x1) * k / length, y1 + (y2 - y1) * k / length) for k in (at, end)]
            pen.line(ends, fill=shape.color, width=width)
            at = end + SPACE * SCALE


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    enlarged = width > image.width
    kind = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
    return image.convert("RGB").resize((width, height), kind)
