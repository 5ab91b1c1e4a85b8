"""How far the planning is, for a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is, and how much there is (None: nobody knows)."""

T = TypeVar("T")


def silent(what: str, done: int, total: int | None) -> None:
    """A progress that tells nobody."""


def counted(items: Iterable[T], what: str, total: int | None, progress: Progress) -> Iterator[T]:
    """The items, each reported when it is there."""
    progress(what, 0, total)
    for done, item in enumerate(items, start=1):
        progress(what, done, total)
        yield item
