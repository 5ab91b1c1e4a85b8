"""An iterator's next item, made in a thread of its own while the one before is used."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Generic, TypeVar

Item = TypeVar("Item")

CLOSE_SECONDS = 5.0
"""What an item that is on its way has when nobody wants it any more."""


class _Next(threading.Thread, Generic[Item]):
    """One item on its way; a daemon, since what it waits for may never come."""

    def __init__(self, items: Generator[Item]) -> None:
        super().__init__(name="vlmpack-ahead", daemon=True)
        self.items = items
        self.found: list[Item] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Make it."""
        try:
            self.found.extend(self._one())
        except BaseException as error:  # left out, one that is no Exception would be the data's end
            self.error = error

    def _one(self) -> list[Item]:
        for item in self.items:
            return [item]
        return []


def one_ahead(items: Generator[Item]) -> Generator[Item]:
    """The items, each made while the one before is used. The first is begun when it is asked for;
    exactly one is on its way from then on, so that processes which take the same number of items
    also make the same number.

    Args:
        items: closed with this one, but where an item is still on its way after CLOSE_SECONDS: then
            the end of the process ends it.
    """
    coming = _Next(items)
    try:
        while True:
            coming.join()
            if coming.error is not None:
                raise coming.error
            if not coming.found:
                return
            (item,) = coming.found
            coming = _Next(items)
            yield item
    finally:
        coming.join(CLOSE_SECONDS)
        if not coming.is_alive():
            items.close()
