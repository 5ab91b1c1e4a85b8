"""Titled tables, and figures as short texts, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, one or two lines, and whether it holds words (left) or figures."""

    name: str
    is_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table.

    Args:
        marked: places of rows that stand out: what the recipe has.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    marked: tuple[int, ...] = ()
    lines: tuple[str, ...] = field(default=())

    @staticmethod
    def of_figures(
        title: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]], *lines: str
    ) -> Section:
        """A table with words in its first column and figures in the others."""
        first, *others = heads
        columns = (Column(first, is_text=True), *map(Column, others))
        return Section(title=title, columns=columns, rows=tuple(rows), lines=lines)

    @property
    def heads(self) -> tuple[tuple[str, bool], ...]:
        return tuple((column.name, column.is_text) for column in self.columns)


def compact(value: float) -> str:
    """1,234; 179.8k; 1.23M: at least four digits as they are, then three or four of them."""
    if abs(value) < 10_000:
        whole = round(value)
        return f"{whole:,}" if abs(value - whole) < 0.05 or abs(value) >= 100 else f"{value:.1f}"
    unit = next((unit for unit in range(3) if abs(value) < 999.5 * 1000 ** (unit + 1)), 3)
    value /= 1000 ** (unit + 1)
    return f"{value:.{4 if abs(value) >= 100 else 3}g}" + "kMGT"[unit]


def share(value: float, digits: int = 1) -> str:
    """0.8125 -> 81.2%; what is not nothing is never shown as 0 or as all."""
    text = f"{value:.{digits}%}"
    least = 10.0 ** -(digits + 2)
    if 0 < value < least / 2:
        return f"<{least:.{digits}%}"
    if 1 - least / 2 < value < 1:
        return f">{1 - least:.{digits}%}"
    return text


def percent(share: float, digits: int = 1) -> str:
    return f"{share:.{digits}%}"


def one_line(text: str) -> str:
    """Control characters and line breaks out, so that data cannot move what is drawn."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "\u2026"


def times(value: float) -> str:
    return f"{value:.3f}"
