"""A drawing as a page shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing.

    Args:
        title: above it.
        caption: below it, and what a reader who cannot see it is told.
        narrow: an `<svg>` element for a telephone and for columns.
        wide: another one for a wide page, where there is one.
    """

    title: str
    caption: str
    narrow: str
    wide: str = ""
