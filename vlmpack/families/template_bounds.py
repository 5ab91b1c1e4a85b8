"""Chat templates are programs of a model folder: what one rendering may cost is bounded.

transformers renders them in jinja2's sandbox, which keeps them from files and from Python, but not
from looping for hours. Here its own environment is taken before it has compiled anything, and

    every turn of a loop, call and filter counts; so many are allowed, and so much processor time
    no text, list or number grows beyond a limit by one operation
    the whole text has a limit

so that a hostile template ends in a TemplateError, which is the conversation's fault by name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, wraps
from itertools import permutations
from threading import local
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import do_format
from transformers.utils import chat_template_utils

MAX_TURNS = 2_000_000
"""Turns of loops, calls and filters of one rendering; a published template makes tens a message."""
MAX_SECONDS = 5.0
"""Of the processor's time, for one rendering."""
MAX_CHARACTERS = 64 << 20
"""Of the text, and of anything that goes into it."""
_MAX_BITS = 100_000
_TURNS_PER_LOOK = 16
_SIZED = (str, list, tuple)
_NUMBERS = (int, float)
_DIGITS = re.compile(r"[0-9]{5,}")
_WIDTHS = re.compile(r"\{[^{}]*:[^{}]*?([0-9]{5,})")
_OPERATORS = frozenset({"*", "**", "+", "%"})


class TemplateLimit(TemplateRuntimeError):
    """A template that costs more than any conversation may."""


def bound_templates() -> None:
    """Every chat template that transformers compiles in this process from now on is bounded."""
    if chat_template_utils._compile_jinja_template is not _compiled:
        chat_template_utils._compile_jinja_template = _compiled


@lru_cache
def _compiled(chat_template: str) -> Template:
    """The template as transformers compiles it, in a bounded environment of its own."""
    environment: Any = chat_template_utils._cached_compile_jinja_template("").environment
    costs = _Costs()
    turn = costs.turn
    plain_call, plain_binop = environment.call, environment.call_binop
    generate = environment._generate

    def call(context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        turn()
        if function is turn:
            return ""
        if function is _checked:
            return _checked(*args)
        _check_arguments(function, args, kwargs)
        return _checked(plain_call(context, function, *args, **kwargs))

    def call_binop(context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":  # by far the most frequent: one look is enough, and no turn
            value = left + right
            return value if isinstance(value, _NUMBERS) else _checked(value)
        turn()
        _check_operands(operator, left, right)
        return _checked(plain_binop(context, operator, left, right))

    def generate_counted(source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        _count_turns(source)
        return generate(source, *args, **kwargs)

    environment.call = call
    environment.call_binop = call_binop
    environment.intercepted_binops = environment.intercepted_binops | _OPERATORS
    environment._generate = generate_counted
    environment.vlmpack_turn = turn
    environment.vlmpack_checked = _checked
    environment.globals.pop("lipsum", None)  # random text without end, in one call
    environment.filters = {
        name: _counted(function, turn) for name, function in environment.filters.items()
    }
    template: Template = environment.from_string(chat_template)
    render = template.root_render_func

    def bounded(context: Any, *args: Any, **kwargs: Any) -> Iterator[str]:
        costs.begin()
        length = 0
        for text in render(context, *args, **kwargs):
            length += len(text)
            if length > MAX_CHARACTERS:
                raise _too_large("text", length)
            yield text

    template.root_render_func = bounded
    return template


class _Costs(local):
    """What the rendering of this thread has cost so far."""

    turns = 0
    until = float("inf")

    def begin(self) -> None:
        self.turns = 0
        self.until = time.thread_time() + MAX_SECONDS

    def turn(self) -> str:
        """One more; an empty text, since it stands in a template."""
        self.turns = turns = self.turns + 1
        if turns % _TURNS_PER_LOOK:
            return ""
        if turns > MAX_TURNS:
            raise TemplateLimit(f"it makes more than {MAX_TURNS:,} turns of loops and calls")
        if time.thread_time() > self.until:
            raise TemplateLimit(f"it takes longer than {MAX_SECONDS:g} s")
        return ""


def _count_turns(source: nodes.Template) -> None:
    """Puts a call into every loop, and around every join of texts."""
    for loop in list(source.find_all(nodes.For)):
        turn = nodes.Call(nodes.EnvironmentAttribute("vlmpack_turn"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(turn).set_lineno(loop.lineno))
    _wrap_joins(source)


def _wrap_joins(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            for place, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _wrap_joins(item)
                    value[place] = _wrapped(item)
        elif isinstance(value, nodes.Node):
            _wrap_joins(value)
            setattr(node, name, _wrapped(value))


def _wrapped(node: nodes.Node) -> nodes.Node:
    if not isinstance(node, nodes.Concat):
        return node
    joined = nodes.EnvironmentAttribute("vlmpack_checked")
    return nodes.Call(joined, [node], [], None, None).set_lineno(node.lineno)


def _counted(function: Callable[..., Any], turn: Callable[[], str]) -> Callable[..., Any]:
    @wraps(function)  # with jinja's marks of what it is passed
    def counted(*args: Any, **kwargs: Any) -> Any:
        turn()
        _check_arguments(function, args, kwargs)
        return _checked(function(*args, **kwargs))

    return counted


def _check_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what would make a huge text: a width, or a replacement of every character."""
    if not args and not kwargs:
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_CHARACTERS:
            raise _too_large("number as an argument", value)
    name = getattr(function, "__name__", "").removeprefix("do_")
    if name not in _GROWING:
        return
    if function is do_format:
        _check_operands("%", args[0], args[1:] or tuple(kwargs.values()))
        return
    plain = getattr(function, "__wrapped__", function)  # the sandbox wraps a text's `format`
    named = [kwargs[key] for key in sorted(kwargs, key="new".__eq__)]  # what is new comes last
    given = (getattr(plain, "__self__", None), *args, *named)
    size = _GROWING[name]([value for value in given if isinstance(value, (*_SIZED, dict))])
    if size > MAX_CHARACTERS:
        raise _too_large(f"text by {name}", size)


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
    longest = [
        len(v) for item in given if isinstance(item, dict) for v in item.values() if _is_sized(v)
    ]
    return max(longest, default=1) * max(map(len, given), default=0)


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


def _is_sized(value: Any) -> bool:
    return isinstance(value, _SIZED)


def _total(value: Any) -> int:
    """Characters of a text, or of the texts in a list."""
    if isinstance(value, str):
        return len(value)
    return sum(len(item) if isinstance(item, str) else 1 for item in value)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        numbers = right if isinstance(right, tuple) else (right,)
        if "*" in left and any(isinstance(n, int) and abs(n) > MAX_CHARACTERS for n in numbers):
            raise _too_large("width", max(n for n in numbers if isinstance(n, int)))
        widths = [int(digits[:9]) for digits in _DIGITS.findall(left)]
        if widths and max(widths) > MAX_CHARACTERS:
            raise _too_large("width", max(widths))
        return
    if operator == "*":
        for text, count in ((left, right), (right, left)):
            if _is_sized(text) and isinstance(count, int) and len(text) * count > MAX_CHARACTERS:
                raise _too_large("repetition", len(text) * count)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * abs(right)
        if bits > _MAX_BITS:
            raise TemplateLimit(f"it makes a number of {bits:,} bits; at most {_MAX_BITS:,}")


def _checked(value: Any) -> Any:
    if type(value) in _SIZED and len(value) > MAX_CHARACTERS:
        raise _too_large("value", len(value))
    return value


def _too_large(what: str, size: int) -> TemplateLimit:
    return TemplateLimit(f"it makes a {what} of {size:,}; at most {MAX_CHARACTERS:,}")
