"""What the colours of a row's picture mean."""

from __future__ import annotations

from vlmpack.proof.rows.shown import ShownRow
from vlmpack.report.inspect.canvas import INK, Canvas, Path, Rect, Text, fitted, text_width
from vlmpack.report.inspect.colors import (
    AXES,
    AXIS_NAMES,
    IMAGE_TOKENS,
    LOSS,
    PAD,
    PAD_LINES,
    TEXT_TOKENS,
    rank_color,
    segment_color,
)
from vlmpack.report.inspect.lines import GUTTER

SMALL = 10.0


def draw_legend(canvas: Canvas, row: ShownRow) -> None:
    """What the colours mean, in as many lines as it takes."""
    has_images = row.batch.media is not None
    axes = int(row.batch.position_ids.shape[0])
    names: tuple[str, ...] = ("position",) if axes == 1 else AXIS_NAMES[:axes]
    size = row.rules.context
    ranks = (0, size - 1) if size > 1 else ()
    entries: list[tuple[str, str | None, str]] = [
        (segment_color(0)[0], None, "a sample: number, key, tokens"),
        (PAD, PAD_LINES, "padding"),
        (TEXT_TOKENS, None, "text tokens"),
        *([(IMAGE_TOKENS, None, "image tokens")] if has_images else []),
        (LOSS, None, "slots with loss: their next token is learnt"),
        *((AXES[k % len(AXES)], "line", name) for k, name in enumerate(names)),
        (INK, "line", "segment ends (dashed: its sample does)"),
        *((rank_color(rank, size)[0], None, f"CP rank {rank}") for rank in ranks),
    ]
    x, y = GUTTER, canvas.height + 14
    for color, kind, text in entries:
        wide = 18 + text_width(text, SMALL) + 16
        if x + wide > canvas.width and x > GUTTER:
            x, y = GUTTER, y + 16
        if kind == "line":
            canvas.add(Path(points=((x, y - 4), (x + 12, y - 4)), color=color, width=2))
        else:
            canvas.add(Rect(x=x, y=y - 9, width=12, height=10, fill=color, hatch=kind))
        canvas.add(Text(x=x + 18, y=y, text=fitted(text, SMALL, canvas.width - x - 18), size=SMALL))
        x += wide
    canvas.height = y + 10
