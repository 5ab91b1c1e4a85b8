"""How a row is cut into lines of a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from vlmpack.proof.rows.opening import ShownRow

GUTTER = 58.0
"""Pixels for the lanes' names, left of the slots."""
MIN_SEGMENT = 88.0
"""Pixels for a sample of mean length: enough for its number and length."""
MAX_LINES = 48


@dataclass(frozen=True, slots=True)
class Line:
    """Slots `begin` to `end` of the row, drawn from `left` at `scale` pixels a slot."""

    begin: int
    end: int
    left: float
    scale: float

    def x(self, slot: float) -> float:
        """Where a slot begins."""
        return self.left + (slot - self.begin) * self.scale

    def cut(self, begin: int, end: int) -> tuple[int, int] | None:
        """The part of a range that is in this line."""
        first, last = max(begin, self.begin), min(end, self.end)
        return (first, last) if first < last else None


def row_lines(row: ShownRow, width: float) -> list[Line]:
    """The row cut into lines; rows of mode `none` get one each."""
    room = width - GUTTER - 2
    slots = max(1, row.num_slots)
    if row.is_padded:
        count, each = min(row.shown.num_rows, MAX_LINES), slots // row.shown.num_rows
    else:
        wanted = max(slots / room, len(row.segments) * MIN_SEGMENT / room)
        count = min(MAX_LINES, max(1, -int(-wanted // 1)))
        each = -(-slots // count)
        count = -(-slots // each)
    scale = room / each
    return [Line(k * each, min((k + 1) * each, slots), GUTTER, scale) for k in range(count)]


def runs(values: Iterable[int], start: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, value) of neighbours that are equal."""
    for value, members in groupby(values):
        length = sum(1 for _ in members)
        yield start, start + length, value
        start += length
