"""Chat templates are programs of a model folder, so what one rendering may cost is bounded.

transformers renders them in jinja2's sandbox. It keeps them from files and from Python, but not
from looping for hours. Here they are compiled in a subclass of that sandbox, which sets limits:

- Every turn of a loop, every call and every filter counts. Their number is limited, and so is the
  processor time.
- No text, list or number grows beyond a limit. Its size is measured before it is made. A list
  counts with the length of its text.
- The whole text has a limit. So have the texts of all blocks (`{% set x %}`, a macro) together.

A filter or method that makes a large value in one go is measured only afterwards. These are
`format` or `%` of a text with many fields, `indent`, `wordwrap`, `expandtabs`, and `tojson` with an
indent. Time is checked between operations, so a sort or a comparison of two lists ends first.
A hostile template ends in a TemplateError, which names the conversation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from itertools import chain, permutations
from threading import local
from types import MappingProxyType
from typing import Any, ClassVar

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import do_format, make_attrgetter
from jinja2.runtime import Context, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_environment
from transformers.utils import chat_template_utils

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


MAX_TURNS = 2_000_000
"""Turns of loops, calls and filters of one rendering; a published template makes tens a message."""
MAX_SECONDS = 5.0
"""Seconds of the processor's time for one rendering."""
_TURNS_PER_LOOK = 16
_ITEMS_PER_LOOK = 4096
_NUMBERS = (int, float)
_BLOCKS = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)
"""What keeps a text before it is written."""


def bound_templates() -> None:
    """Every chat template that transformers renders in this process from now on is bounded: it
    makes an environment of this class for each of them."""
    if chat_template_utils.ImmutableSandboxedEnvironment is BoundedEnvironment:  # type: ignore[attr-defined]
        return
    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # type: ignore[attr-defined]
    for function in vars(chat_template_utils).values():  # it keeps templates that it has compiled
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@cache
def bounded_environment() -> BoundedEnvironment:
    """An environment as transformers sets it up for a chat template."""
    bound_templates()
    chat_template_utils.render_jinja_template([], chat_template="{# vlmpack #}")
    return BoundedEnvironment.newest


class _Counting(CodeGenerator):
    """Compiles a template with calls that count and measure."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:  # noqa: N802
        """jinja's, of the template with those calls in it."""
        _count_turns(node)
        super().visit_Template(node, frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox, in which the cost of a rendering is bounded."""

    code_generator_class = _Counting
    intercepted_binops = ImmutableSandboxedEnvironment.intercepted_binops | {"*", "**", "+", "%"}
    newest: ClassVar[BoundedEnvironment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.costs = costs = _Costs()
        self.vlmpack_turn, self.vlmpack_written = costs.turn, costs.written
        self.vlmpack_made, self.vlmpack_join = costs.made, costs.check
        self.is_measured = False

    def from_string(self, source: str | nodes.Template, *args: Any, **kwargs: Any) -> Template:
        """The template, once transformers has given the environment its filters and functions."""
        if not self.is_measured:
            self._measure()
        template = super().from_string(source, *args, **kwargs)
        render = template.root_render_func

        def bounded(context: Context, *args: Any, **kwargs: Any) -> Iterator[str]:
            self.costs.start()
            length = 0
            try:
                for text in render(context, *args, **kwargs):
                    length += len(text)
                    refuse_large("text", length)
                    yield text
            finally:
                self.costs.sizes.forget()

        template.root_render_func = bounded
        BoundedEnvironment.newest = self
        return template

    def _measure(self) -> None:
        self.is_measured = True
        self.globals.pop("lipsum", None)  # random text without end, in one call
        namespace: Any = self.globals["namespace"]
        namespace.__repr__ = lambda _: "<Namespace>"  # not what is in it
        self.filters = {name: _counted(one, self.costs) for name, one in self.filters.items()}
        self.filters["sum"] = _summed(self.filters["sum"], self.costs)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """jinja's, counted, its arguments and what it makes measured."""
        costs = self.costs
        costs.turn()
        if function is self.vlmpack_turn:
            return ""
        if function is self.vlmpack_made:
            return costs.made(*args)
        if function is self.vlmpack_written:
            return costs.written(*args)
        if function is self.vlmpack_join:
            costs.check(*args)
            return (markup_join if context.eval_ctx.autoescape else str_join)(args)
        check_arguments(function, args, kwargs)
        if isinstance(function, Macro):  # which puts them in a list that it makes itself
            costs.check(*args, *kwargs.values())
        return costs.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """jinja's, measured before it is made."""
        costs = self.costs
        if operator == "+":  # by far the most frequent: one look is enough, and no turn
            if isinstance(left, str) and isinstance(right, str):
                refuse_large("text", len(left) + len(right))
                return left + right
            return left + right if isinstance(left, _NUMBERS) else costs.added(left, right)
        costs.turn()
        check_operands(operator, left, right)
        if operator == "*":
            return costs.repeated(left, right)
        return costs.made(super().call_binop(context, operator, left, right))


class _Costs(local):
    """What the rendering of this thread has cost so far."""

    turns = 0
    until = float("inf")
    in_blocks = 0

    def __init__(self) -> None:
        self.sizes = Sizes()

    def start(self) -> None:
        self.turns = self.in_blocks = 0
        self.until = time.thread_time() + MAX_SECONDS

    def turn(self) -> str:
        """One more; an empty text, since it stands in a template."""
        self.turns = turns = self.turns + 1
        if turns % _TURNS_PER_LOOK:
            return ""
        if turns > MAX_TURNS:
            raise TemplateLimit(f"it makes more than {MAX_TURNS:,} turns of loops and calls")
        self.look()
        return ""

    def look(self) -> None:
        """Look at the clock."""
        if time.thread_time() > self.until:
            raise TemplateLimit(f"it takes longer than {MAX_SECONDS:g} s")

    def check(self, *values: Any) -> int:
        """Refuses to put these together if they are too large by what is in them."""
        size = sum(map(self.sizes.of, values))
        refuse_large("value", size)
        return size

    def made(self, value: Any) -> Any:
        """The value of an operation, if it is not too large by what is in it."""
        if isinstance(value, str):
            refuse_large("value", len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.check(value)
            if len(value) > _ITEMS_PER_LOOK:
                self.look()
        elif isinstance(value, bytes):
            raise TemplateLimit("it makes bytes; only texts are measured")
        return value

    def written(self, value: Any) -> Any:
        """A value that a block writes, if those of all blocks are not too large together: a block
        that writes itself twice doubles."""
        self.in_blocks += len(value) if isinstance(value, str) else self.sizes.of(value)
        refuse_large("text in blocks", self.in_blocks)
        return value

    def added(self, left: Any, right: Any) -> Any:
        size = self.check(left, right)
        return self.keep(left + right, size)

    def repeated(self, left: Any, right: Any) -> Any:
        value, count = (left, right) if isinstance(left, NESTED) else (right, left)
        if not isinstance(value, NESTED) or not isinstance(count, int):
            return self.made(left * right)
        size = self.sizes.of(value) * count
        refuse_large("repetition", size)
        return self.keep(left * right, size)

    def keep(self, value: Any, size: int) -> Any:
        if isinstance(value, NESTED):
            self.sizes.keep(value, size)
            if len(value) > _ITEMS_PER_LOOK:
                self.look()
        return value


def _count_turns(source: nodes.Template) -> None:
    """Puts a call into every loop, around every join of texts, and round what blocks write."""
    for loop in list(source.find_all(nodes.For)):
        turn = nodes.Call(nodes.EnvironmentAttribute("vlmpack_turn"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(turn).set_lineno(loop.lineno))
    _wrap_joins(source)
    seen: set[int] = set()
    for block in source.find_all(_BLOCKS):
        for output in block.find_all(nodes.Output):
            if id(output) not in seen:  # blocks nest
                seen.add(id(output))
                output.nodes = [_measured("vlmpack_written", [node]) for node in output.nodes]


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
    """In a call that measures: a join before it is made, a list or a dict as soon as it is."""
    if isinstance(node, nodes.Concat):
        name, given = "vlmpack_join", node.nodes
    elif isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and not _is_fixed(node):
        name, given = "vlmpack_made", [node]
    else:
        return node
    return _measured(name, given).set_lineno(node.lineno)


def _measured(name: str, given: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), given, [], None, None)


def _is_fixed(node: nodes.Node) -> bool:
    """Whether it is what the template spells, or names to assign to."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return getattr(node, "ctx", "") == "store" or all(map(_is_fixed, node.items))
    if isinstance(node, nodes.Dict):
        return all(_is_fixed(pair.key) and _is_fixed(pair.value) for pair in node.items)
    return isinstance(node, nodes.Const)


def _counted(function: Callable[..., Any], costs: _Costs) -> Callable[..., Any]:
    @wraps(function)  # with jinja's marks of what it is passed
    def counted(*args: Any, **kwargs: Any) -> Any:
        costs.turn()
        check_arguments(function, args, kwargs)
        return costs.made(function(*args, **kwargs))

    return counted


def _summed(plain: Callable[..., Any], costs: _Costs) -> Callable[..., Any]:
    @pass_environment
    def summed(environment: Any, items: Any, attribute: Any = None, start: Any = 0) -> Any:
        """jinja's, except that lists are measured before they are joined."""
        if not isinstance(start, (list, tuple)):
            return plain(environment, items, attribute, start)
        if attribute is not None:
            items = map(make_attrgetter(environment, attribute), items)
        for item in items:
            costs.turn()
            start = costs.added(start, item)
        return start

    return summed
