"""The colours of a row's picture; all of them can be told apart by colour-blind people."""

from __future__ import annotations

from vlmpack.report.inspect.canvas import INK

COLORS = (
    ("#0072b2", "#ffffff"),
    ("#7cc6ee", INK),
    ("#009e73", "#ffffff"),
    ("#d79abf", INK),
    ("#e9d54d", INK),
)
"""(fill, ink) of neighbouring samples, from Okabe and Ito's colour-blind-safe set."""
PAD, PAD_LINES = "#f3f4f6", "#8b96a3"
TEXT_TOKENS, IMAGE_TOKENS = "#d9dee4", "#5b4a8a"
LOSS, NO_LOSS = "#d55e00", "#f3f4f6"
AXES = ("#1f2933", "#0072b2", "#d55e00", "#009e73")
AXIS_NAMES = ("temporal position", "height position", "width position")
RANKS = ("#f0e68c", "#7ad151", "#22a884", "#2a788e", "#414487", "#2c0d44")
"""Viridis from light to dark: zigzag shows as light to dark and back to light."""


def segment_color(number: int) -> tuple[str, str]:
    """(fill, ink) of a segment."""
    return COLORS[number % len(COLORS)]


def rank_color(rank: int, size: int) -> tuple[str, str]:
    """(fill, ink) of a context-parallel rank."""
    place = round(rank * (len(RANKS) - 1) / max(1, size - 1))
    if size <= len(RANKS):
        return RANKS[place], INK if place < 3 else "#ffffff"
    low, share = divmod(rank * (len(RANKS) - 1) / (size - 1), 1)
    ends = (RANKS[int(low)], RANKS[min(int(low) + 1, len(RANKS) - 1)])
    parts = [
        round(int(ends[0][k : k + 2], 16) * (1 - share) + int(ends[1][k : k + 2], 16) * share)
        for k in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts), INK if low < 3 else "#ffffff"
