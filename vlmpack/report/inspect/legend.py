"""The colours of a row's picture, which colour-blind people can tell apart, and what they mean."""

from __future__ import annotations

from vlmpack.proof.rows.opening import ShownRow
from vlmpack.report.inspect.canvas import (
    DARK_INK,
    INK,
    Canvas,
    Path,
    Rect,
    Text,
    fitted,
    text_width,
)
from vlmpack.report.inspect.lines import GUTTER

SMALL = 10.0

COLORS = (
    ("#0072b2", "#ffffff"),
    ("#7cc6ee", DARK_INK),
    ("#00805d", "#ffffff"),
    ("#d79abf", DARK_INK),
    ("#e9d54d", DARK_INK),
)
"""(fill, ink) of neighbouring samples, from Okabe and Ito's colour-blind-safe set."""
PAD, PAD_LINES = "var(--pad)", "var(--pad-lines)"
TEXT_TOKENS, IMAGE_TOKENS = "var(--text-tokens)", "var(--violet)"
LOSS, NO_LOSS = "var(--loss)", "var(--pad)"
AXES = (INK, "var(--blue)", LOSS, "var(--green)")
AXIS_NAMES = ("temporal position", "height position", "width position")
RANKS = ("#f0e68c", "#7ad151", "#22a884", "#2a788e", "#414487", "#2c0d44")
"""Viridis from light to dark: zigzag shows as light to dark and back to light."""


def segment_color(number: int) -> tuple[str, str]:
    """(fill, ink) of a segment."""
    return COLORS[number % len(COLORS)]


def rank_color(rank: int, size: int) -> tuple[str, str]:
    """(fill, ink) of a context-parallel rank."""
    place = rank * (len(RANKS) - 1) / max(1, size - 1)
    low, share = divmod(place, 1)
    ends = (RANKS[int(low)], RANKS[min(int(low) + 1, len(RANKS) - 1)])
    parts = [
        round(int(ends[0][k : k + 2], 16) * (1 - share) + int(ends[1][k : k + 2], 16) * share)
        for k in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts), DARK_INK if place < 3 else "#ffffff"


def draw_legend(canvas: Canvas, row: ShownRow) -> None:
    """What the colours mean, in as many lines as it takes."""
    has_images = row.batch.media is not None
    axes = int(row.batch.position_ids.shape[0])
    names: tuple[str, ...] = ("position",) if axes == 1 else AXIS_NAMES[:axes]
    size = row.rules.context
    ranks = (0, size - 1) if size > 1 else ()
    entries: list[tuple[str, str | None, str]] = [
        (segment_color(0)[0], None, "a sample, or what several share: number, key, tokens"),
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
