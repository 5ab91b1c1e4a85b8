"""How large a value of a chat template would be if it were written out.

A list that holds another one twice is small, and its text, or a look at each of its items, is twice
as large as the other's: sixty of them, each in the next, are a program that never ends. So what
is shared counts as often as it appears, and each list is walked once.
"""

from __future__ import annotations

from itertools import chain
from threading import local
from types import MappingProxyType
from typing import Any

ITEM = 8
"""Bytes of a place in a list: what an item takes besides its text."""
_MAX_KNOWN_ITEMS = 1 << 22
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_MAPPINGS: tuple[type[Any], ...] = (dict, MappingProxyType)
NESTED: tuple[type[Any], ...] = (list, tuple, *_MAPPINGS, *_VIEWS)
"""The kinds that hold other values, and show them when they are written."""


class Sizes(local):
    """Sizes of the lists of this thread's rendering: none of them can change, in the sandbox."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        self._items = 0

    def forget(self) -> None:
        """Lets go of the lists, which are kept so that no other one gets their place."""
        self._known.clear()
        self._items = 0

    def of(self, value: Any) -> int:
        """Characters of the text, about, with all that is in it."""
        if isinstance(value, str):
            return ITEM + len(value)
        if isinstance(value, int):
            return ITEM + value.bit_length() // 3
        if not isinstance(value, NESTED):
            return ITEM
        if self._items > _MAX_KNOWN_ITEMS:
            self.forget()
        return self._nested(value)

    def _nested(self, value: Any) -> int:
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        items: Any = value
        if isinstance(value, _VIEWS):
            items = value.mapping
        if isinstance(items, _MAPPINGS):
            items = chain(items.keys(), items.values())
        size = ITEM
        for item in items:
            if isinstance(item, str):
                size += ITEM + len(item)
            elif isinstance(item, NESTED):
                size += self._nested(item)
            elif isinstance(item, int):
                size += ITEM + item.bit_length() // 3
            else:
                size += ITEM
        self.keep(value, size)
        return size

    def keep(self, value: Any, size: int) -> None:
        """Knows the size of a list from what it was made of."""
        self._known[id(value)] = value, size
        self._items += 1 + len(value)
