"""A titled table of text."""

from __future__ import annotations

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
        title: above it.
        columns: of the table.
        rows: as many texts each.
        marked: places of rows that stand out: what the recipe has.
        lines: sentences below.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    marked: tuple[int, ...] = ()
    lines: tuple[str, ...] = field(default=())

    @property
    def heads(self) -> tuple[tuple[str, bool], ...]:
        """Name of each column, and whether it holds words."""
        return tuple((column.name, column.is_text) for column in self.columns)
