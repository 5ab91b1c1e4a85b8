"""How much an operation of a chat template would make, asked before it makes it.

A width of a number, a text times a count, a replacement of every character: each is one call that
could take the machine's memory before anyone looks at what came out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import do_format

MAX_CHARACTERS = 64 << 20
"""Most characters of the text, and of anything that goes into it."""
_MAX_BITS = 100_000
_SIZED = (str, list, tuple)
_DIGITS = re.compile(r"[0-9]{5,}")
_WIDTHS = re.compile(r"\{[^{}]*:[^{}]*?([0-9]{5,})")


class TemplateLimit(TemplateRuntimeError):
    """A template that costs more than any conversation may."""


def check_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what would make a huge text: a width, or a replacement of every character."""
    if not args and not kwargs:
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_CHARACTERS:
            raise too_large("number as an argument", value)
    name = getattr(function, "__name__", "").removeprefix("do_")
    if name not in _GROWING:
        return
    if function is do_format:
        check_operands("%", args[0], args[1:] or tuple(kwargs.values()))
        return
    plain = getattr(function, "__wrapped__", function)  # the sandbox wraps a text's `format`
    named = [kwargs[key] for key in sorted(kwargs, key="new".__eq__)]  # what is new comes last
    given = (getattr(plain, "__self__", None), *args, *named)
    size = _GROWING[name]([value for value in given if isinstance(value, (*_SIZED, dict))])
    refuse_large(f"text by {name}", size)


def _replaced(given: list[Any]) -> int:
    """Characters of a text in which one is replaced by another, in this order."""
    texts = [value for value in given if isinstance(value, str)]
    if len(texts) < 3:
        return 0
    text, one, other = texts[:3]
    return len(text) + text.count(one) * len(other)


def _joined(given: list[Any]) -> int:
    """Characters of the items and of a text between them, whichever is which."""
    if len(given) < 2:
        return 0
    between = max(len(items) * len(text) for items, text in permutations(given, 2))
    return between + sum(map(_total, given))


def _translated(given: list[Any]) -> int:
    """Characters of a text whose characters stand for texts."""
    values = [value for item in given if isinstance(item, dict) for value in item.values()]
    longest = max((len(value) for value in values if isinstance(value, _SIZED)), default=1)
    return longest * max(map(len, given), default=0)


def _formatted(given: list[Any]) -> int:
    """The largest width in a text to fill in."""
    text = given[0] if given and isinstance(given[0], str) else ""
    return max((int(digits[:18]) for digits in _WIDTHS.findall(text)), default=0)


_GROWING: Mapping[str, Callable[[list[Any]], int]] = {
    "replace": _replaced,
    "join": _joined,
    "translate": _translated,
    "format": _formatted,
    "format_map": _formatted,
}
"""Function -> how much it makes of the texts that it is given, at most."""


def _total(value: Any) -> int:
    """Characters of a text, or of the texts in a list."""
    if isinstance(value, str):
        return len(value)
    return sum(len(item) if isinstance(item, str) else 1 for item in value)


def check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        numbers = right if isinstance(right, tuple) else (right,)
        if "*" in left and any(isinstance(n, int) and abs(n) > MAX_CHARACTERS for n in numbers):
            raise too_large("width", max(n for n in numbers if isinstance(n, int)))
        refuse_large("width", max((int(d[:9]) for d in _DIGITS.findall(left)), default=0))
        return
    if operator == "*":
        for text, count in ((left, right), (right, left)):
            if isinstance(text, _SIZED) and isinstance(count, int):
                refuse_large("repetition", len(text) * count)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * abs(right)
        if bits > _MAX_BITS:
            raise TemplateLimit(f"it makes a number of {bits:,} bits; at most {_MAX_BITS:,}")


def refuse_large(what: str, size: int) -> None:
    if size > MAX_CHARACTERS:
        raise too_large(what, size)


def too_large(what: str, size: int) -> TemplateLimit:
    return TemplateLimit(f"it makes a {what} of {size:,}; at most {MAX_CHARACTERS:,}")
