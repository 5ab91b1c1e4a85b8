"""The PNG: what the row is, the checks, the row to scale, and its segments as a table."""

from __future__ import annotations

from collections.abc import Sequence

from PIL.Image import Image

from vlmpack.proof.check import Check
from vlmpack.proof.rows.shown import ShownRow
from vlmpack.report.inspect.canvas import (
    BAD,
    FAINT,
    INK,
    MUTED,
    Canvas,
    Path,
    Rect,
    Text,
    fitted,
    text_width,
)
from vlmpack.report.inspect.colors import PAD, PAD_LINES, segment_color
from vlmpack.report.inspect.lanes import draw_lanes
from vlmpack.report.inspect.png import draw_png
from vlmpack.report.inspect.table import COLUMNS, table_rows, totals

WIDTH = 1200.0
MARGIN = 20.0
LINE = 17.0
NAME_WIDTH = 210.0
MAX_TABLE_ROWS = 64
COLUMN_WIDTHS = (46.0, 300.0, 210.0, 80.0, 80.0, 80.0, 130.0, 130.0, 104.0)
TEXT_COLUMNS = ("key", "shard")


def draw_row(row: ShownRow, checks: Sequence[Check], source: str) -> Image:
    """The picture.

    Args:
        row: what to draw.
        checks: of the row.
        source: the recipe, for the head.
    """
    inner = Canvas(WIDTH - 2 * MARGIN)
    _head(inner, row, source)
    _checks(inner, checks)
    draw_lanes(inner, row)
    _table(inner, row)
    inner.height += MARGIN
    images = [image for sample in row.shown.samples for image in sample.images]
    return draw_png(_moved(inner), images)


def _moved(inner: Canvas) -> Canvas:
    """The canvas with margins around it."""
    outer = Canvas(WIDTH, inner.height + 2 * MARGIN)
    for shape in inner.shapes:
        outer.add(shape.moved(MARGIN, MARGIN))
    return outer


def _head(canvas: Canvas, row: ShownRow, source: str) -> None:
    title = row.shown.title[:1].upper() + row.shown.title[1:]
    canvas.add(Text(x=0, y=18, text=fitted(title, 18, canvas.width), size=18, bold=True))
    about = f"{source}, packing.mode {row.mode}"
    canvas.add(Text(x=0, y=38, text=fitted(about, 12, canvas.width), size=12, color=MUTED))
    canvas.height = 46.0
    x, y = 0.0, canvas.height + 12
    for total in totals(row):
        name, value = f"{total.name} ", total.value
        wide = text_width(name, 12) + text_width(value, 12) + 24
        if x and x + wide - 24 > canvas.width:
            x, y = 0.0, y + LINE
        canvas.add(Text(x=x, y=y, text=name, size=12, color=MUTED))
        canvas.add(Text(x=x + text_width(name, 12), y=y, text=value, size=12))
        x += wide
    canvas.height = y + 12


def _checks(canvas: Canvas, checks: Sequence[Check]) -> None:
    for check in checks:
        canvas.height += LINE
        y = canvas.height
        color = BAD if check.fails else INK
        canvas.mark(0, y, not check.fails)
        canvas.add(Text(x=18, y=y, text=check.name, size=12, color=color, bold=True))
        room = canvas.width - NAME_WIDTH - 18
        detail = fitted(check.sentence, 12, room)
        canvas.add(Text(x=18 + NAME_WIDTH, y=y, text=detail, size=12, color=color))
    canvas.height += 8


def _table(canvas: Canvas, row: ShownRow) -> None:
    rows = table_rows(row)
    canvas.height += 14
    _table_line(canvas, COLUMNS, MUTED)
    y = canvas.height + 5
    canvas.add(Path(points=((0, y), (canvas.width, y)), color=FAINT))
    canvas.height += 6
    for segment, cells in zip(row.segments[:MAX_TABLE_ROWS], rows, strict=False):
        fill = segment_color(segment.number)[0] if segment.sample is not None else PAD
        hatch = None if segment.sample is not None else PAD_LINES
        y = canvas.height + LINE
        canvas.add(Rect(x=0, y=y - 10, width=12, height=12, fill=fill, hatch=hatch))
        _table_line(canvas, cells, INK)
    if len(rows) > MAX_TABLE_ROWS:
        canvas.height += LINE
        more = f"and {len(rows) - MAX_TABLE_ROWS} more segments, in the HTML page"
        canvas.add(Text(x=0, y=canvas.height, text=more, size=12, color=MUTED))


def _table_line(canvas: Canvas, cells: Sequence[str], color: str) -> None:
    """Words to the left, numbers to the right of their columns."""
    canvas.height += LINE
    x = 0.0
    for name, cell, width in zip(COLUMNS, cells, COLUMN_WIDTHS, strict=True):
        shown = fitted(cell, 12, width - 14)
        if name in TEXT_COLUMNS:
            canvas.add(Text(x=x, y=canvas.height, text=shown, size=12, color=color))
        else:
            right = x + width - 14
            canvas.add(
                Text(x=right, y=canvas.height, text=shown, size=12, color=color, anchor="end")
            )
        x += width
