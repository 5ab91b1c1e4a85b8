"""Values of expressions, one function a kind of node."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tools.servers.interpreter import OPERATORS, Interpreter, Kind
from tools.servers.tensors import Weight
from tools.servers.values import (
    Class,
    External,
    Function,
    Instance,
    Layer,
    Parameter,
    Raised,
    Scope,
    Super,
    Unknown,
    Unread,
    last_name,
)


def guarded(function: Callable[[], Any]) -> Any:
    """What a function of Python gives; its errors are those of the code that is read."""
    try:
        return function()
    except (KeyError, IndexError, ValueError, AttributeError, TypeError, StopIteration) as error:
        raise Raised(type(error).__name__, error) from error


def items(value: Any) -> Any:
    """What a loop goes through.

    Raises:
        Unread: it is not known what it holds.
    """
    if isinstance(value, Instance):
        if isinstance(value.attributes.get("layers_"), list):
            return list(value.attributes["layers_"])
        raise Unread(f"{value} is gone through")
    return value


def _name(reader: Interpreter, node: ast.Name, scope: Scope) -> Any:
    return reader.lookup(node.id, scope, scope.module)


def _attribute(reader: Interpreter, node: ast.Attribute, scope: Scope) -> Any:
    value = reader.evaluate(node.value, scope)
    try:
        return reader.get(value, node.attr)
    except Raised:
        if isinstance(value, Instance) and isinstance(value.cls, Layer):
            return Unknown(f"{value}.{node.attr}")  # a layer that is not read
        if reader.tolerant and type(value).__name__.endswith("Config"):
            reader.undecided[f"{type(value).__name__} has no {node.attr}"] = None
            return Unknown(f"config.{node.attr}")
        raise


def _call(reader: Interpreter, node: ast.Call, scope: Scope) -> Any:
    if isinstance(node.func, ast.Name) and node.func.id == "super":
        around: Scope | None = scope
        while around is not None and around.names.get("__class__") is None:
            around = around.outer
        if around is None:
            raise Unread("super() outside of a method")
        owner = reader.evaluate(node.args[0], scope) if node.args else around.names["__class__"]
        return Super(around.names["__self__"], owner)
    function = reader.evaluate(node.func, scope)
    args = _elements(reader, node.args, scope)
    named: dict[str, Any] = {}
    for keyword in node.keywords:
        value = reader.evaluate(keyword.value, scope)
        if keyword.arg is not None:
            named[keyword.arg] = value
        elif isinstance(value, dict):
            named |= value
    if (
        isinstance(node.func, ast.Name)
        and node.func.id in _SPECIAL
        and not isinstance(function, Function)
    ):
        return _SPECIAL[node.func.id](reader, *args)
    return call(reader, function, args, named, ast.unparse(node.func))


def call(
    reader: Interpreter, function: Any, args: list[Any], named: dict[str, Any], text: str
) -> Any:
    """Call what an expression names."""
    if isinstance(function, Unknown) and not isinstance(function, Layer):
        last = function.text.rpartition(".")[2]
        if function.text.startswith("transformers.models.") and last[:1].isupper():
            return reader.hooks["of transformers"](function.text, *args, **named)
        if last[:1].isupper():
            reader.unread[function.text] = None
        return Unknown(f"{function.text}()")
    if function is partial:
        return partial(args[0], *args[1:], **named)
    if isinstance(function, partial):
        return call(reader, function.func, [*function.args, *args], function.keywords | named, text)
    if isinstance(function, Class | Function) or _ours(function):
        return function(*args, **named)
    if isinstance(function, Instance):
        return Unknown(f"{text}()")
    if any(isinstance(x, Unknown) for x in args) and not _takes_unknown(function):
        return Unknown(f"{text}()")
    if not callable(function):
        return Unknown(f"{text}()")
    if function in (list, tuple, set, enumerate, zip, len, sorted, reversed, iter):
        args = [items(x) for x in args]
    return guarded(lambda: function(*args, **named))


def _ours(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("tools.servers")


def _takes_unknown(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), list | dict | set)


def _has(reader: Interpreter, value: Any, name: str) -> Any:
    if isinstance(value, Unknown):
        return Unknown(f"hasattr({value.text}, {name})")
    try:
        reader.get(value, name)
    except Raised:
        return False
    return True


def _getattr(reader: Interpreter, value: Any, name: str, *default: Any) -> Any:
    if isinstance(name, Unknown):
        return Unknown("getattr")
    try:
        return reader.get(value, name)
    except Raised:
        if default:
            return default[0]
        raise


def _isinstance(reader: Interpreter, value: Any, kinds: Any) -> Any:
    every = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, Unknown):
        return Unknown("isinstance")
    return any(_is_one(value, kind) for kind in every)


def _is_one(value: Any, kind: Any) -> bool:
    if isinstance(kind, type):
        return isinstance(value, kind)
    name = last_name(kind)
    if isinstance(value, Instance):
        return value.cls is kind or (
            value.cls.is_a(name) if isinstance(value.cls, Class) else last_name(value.cls) == name
        )
    if isinstance(value, Parameter | Weight):
        return name in ("Parameter", "Tensor")
    return name in {one.__name__ for one in type(value).__mro__} or (
        name in ("Mapping", "Iterable") and hasattr(value, "__iter__")
    )


def _issubclass(reader: Interpreter, value: Any, kind: Any) -> Any:
    return value.is_a(last_name(kind)) if isinstance(value, Class) else Unknown("issubclass")


def _type(reader: Interpreter, value: Any) -> Any:
    return value.cls if isinstance(value, Instance) else type(value)


def _setattr(reader: Interpreter, value: Any, name: str, given: Any) -> None:
    if isinstance(value, Instance):
        value.attributes[name] = given


def _callable(reader: Interpreter, value: Any) -> Any:
    return isinstance(value, Function | Class) or (callable(value))


def _next(reader: Interpreter, value: Any, *default: Any) -> Any:
    if isinstance(value, Unknown):
        return Unknown("next()")
    return guarded(lambda: next(iter(items(value)), *default))


_SPECIAL: dict[str, Callable[..., Any]] = {
    "hasattr": _has,
    "getattr": _getattr,
    "isinstance": _isinstance,
    "issubclass": _issubclass,
    "type": _type,
    "setattr": _setattr,
    "callable": _callable,
    "next": _next,
    "print": lambda reader, *args: None,
    "id": lambda reader, value: id(value),
}


def _binary(reader: Interpreter, node: ast.BinOp, scope: Scope) -> Any:
    left, right = reader.evaluate(node.left, scope), reader.evaluate(node.right, scope)
    return operate(reader, type(node.op), left, right)


def operate(reader: Interpreter, kind: type[ast.AST], left: Any, right: Any) -> Any:
    if kind is ast.Is or kind is ast.IsNot:
        if isinstance(left, Unknown) and not isinstance(left, External) and right is None:
            return Unknown(f"{left.text} is None")
        return (left is right) == (kind is ast.Is)
    if kind is ast.BitOr and isinstance(left, Instance):
        return reader.get(left, "__or__")(right)
    if kind is ast.BitOr and any(isinstance(x, Class | type | External) for x in (left, right)):
        return tuple(y for x in (left, right) for y in (x if isinstance(x, tuple) else (x,)))
    if kind in (ast.In, ast.NotIn):
        if isinstance(right, Unknown):
            return Unknown(f"in {right.text}")
        right = items(right)
    elif isinstance(left, Unknown) or isinstance(right, Unknown):
        return Unknown(f"{left!r} {kind.__name__} {right!r}")
    return guarded(lambda: OPERATORS[kind](left, right))


def _compare(reader: Interpreter, node: ast.Compare, scope: Scope) -> Any:
    left = reader.evaluate(node.left, scope)
    value: Any = True
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = reader.evaluate(right_node, scope)
        value = operate(reader, type(op), left, right)
        if isinstance(value, Unknown) or not value:
            return value
        left = right
    return value


def _boolean(reader: Interpreter, node: ast.BoolOp, scope: Scope) -> Any:
    """`and` and `or`: what is not known decides only where nothing else does."""
    ends_at = isinstance(node.op, ast.Or)
    unknown: Unknown | None = None
    value: Any = None
    for one in node.values:
        value = reader.evaluate(one, scope)
        if isinstance(value, Unknown):
            unknown = unknown or value
        elif reader.truth(value, one, scope) == ends_at:
            return value
    return unknown if unknown is not None else value


def _unary(reader: Interpreter, node: ast.UnaryOp, scope: Scope) -> Any:
    value = reader.evaluate(node.operand, scope)
    if isinstance(value, Unknown):
        return Unknown(f"not {value.text}")
    if isinstance(node.op, ast.Not):
        return not reader.truth(value, node.operand, scope)
    return -value if isinstance(node.op, ast.USub) else ~value


def _either(reader: Interpreter, node: ast.IfExp, scope: Scope) -> Any:
    holds = reader.truth(reader.evaluate(node.test, scope), node.test, scope)
    return reader.evaluate(node.body if holds else node.orelse, scope)


def _subscript(reader: Interpreter, node: ast.Subscript, scope: Scope) -> Any:
    value = reader.evaluate(node.value, scope)
    if isinstance(value, Unknown):
        return Unknown(f"{value.text}[]")
    if isinstance(value, Class | type):
        return value  # a generic class with its argument
    if isinstance(value, Instance):
        key = reader.evaluate(node.slice, scope)
        inner = value.attributes.get("layers_")
        if isinstance(inner, list) and isinstance(key, int | slice):
            return guarded(lambda: inner[key])
        if isinstance(key, str) and key in value.attributes:
            return value.attributes[key]
        return Unknown(f"{value}[]")
    if isinstance(value, Weight):
        return value.same(reader.evaluate(node.slice, scope))
    key = reader.evaluate(node.slice, scope)
    if isinstance(key, Unknown):
        return Unknown(f"[{key.text}]")
    return guarded(lambda: value[key])


def _slice(reader: Interpreter, node: ast.Slice, scope: Scope) -> Any:
    ends = [
        None if x is None else reader.evaluate(x, scope)
        for x in (node.lower, node.upper, node.step)
    ]
    if unknown := [x for x in ends if isinstance(x, Unknown)]:
        return unknown[0]
    return slice(*ends)


def _elements(reader: Interpreter, nodes: list[ast.expr], scope: Scope) -> list[Any]:
    """The values of a list, those behind stars one by one."""
    found: list[Any] = []
    for one in nodes:
        if isinstance(one, ast.Starred):
            value = reader.evaluate(one.value, scope)
            found += [] if isinstance(value, Unknown) else list(items(value))
        else:
            found.append(reader.evaluate(one, scope))
    return found


def _sequence(reader: Interpreter, node: Any, scope: Scope) -> Any:
    found = _elements(reader, node.elts, scope)
    if isinstance(node, ast.Set):
        return guarded(lambda: set(found))
    return tuple(found) if isinstance(node, ast.Tuple) else found


def _dict(reader: Interpreter, node: ast.Dict, scope: Scope) -> Any:
    found: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        given = reader.evaluate(value, scope)
        if key is not None:
            found[reader.evaluate(key, scope)] = given
        elif isinstance(given, dict):
            found |= given
    return found


def _text(reader: Interpreter, node: ast.JoinedStr, scope: Scope) -> Any:
    parts: list[str] = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
            continue
        assert isinstance(part, ast.FormattedValue)
        value = reader.evaluate(part.value, scope)
        parts.append(value if isinstance(value, str) else repr(value))
    return "".join(parts)


def _comprehension(reader: Interpreter, node: Any, scope: Scope) -> Any:
    inner = Scope({}, scope.module, scope)
    found: list[Any] = []

    def give() -> None:
        if isinstance(node, ast.DictComp):
            found.append((reader.evaluate(node.key, inner), reader.evaluate(node.value, inner)))
        else:
            found.append(reader.evaluate(node.elt, inner))

    _loops(reader, node.generators, inner, give)
    if isinstance(node, ast.DictComp):
        return dict(found)
    if isinstance(node, ast.GeneratorExp):
        return iter(found)
    return guarded(lambda: set(found)) if isinstance(node, ast.SetComp) else found


def assign(reader: Interpreter, target: ast.expr, value: Any, scope: Scope) -> None:
    """Give a value to a name, an attribute, a place in a container, or several of these."""
    if isinstance(target, ast.Name):
        scope.names[target.id] = value
    elif isinstance(target, ast.Attribute):
        owner = reader.evaluate(target.value, scope)
        if isinstance(owner, Instance):
            owner.attributes[target.attr] = value
    elif isinstance(target, ast.Subscript):
        owner, key = reader.evaluate(target.value, scope), reader.evaluate(target.slice, scope)
        if isinstance(owner, Instance) and isinstance(owner.attributes.get("layers_"), list):
            owner = owner.attributes["layers_"]
        if isinstance(owner, list | dict) and not isinstance(key, Unknown):
            owner[key] = value
        elif isinstance(owner, Instance) and isinstance(key, str):
            owner.attributes[key] = value
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(reader, target.elts, value, scope)
    else:
        raise Unread(f"{ast.unparse(target)} is given a value")


def _unpack(reader: Interpreter, targets: list[ast.expr], value: Any, scope: Scope) -> None:
    if isinstance(value, Unknown):
        values: list[Any] = [Unknown(f"{value.text}[]")] * len(targets)
    else:
        values = guarded(lambda: list(items(value)))
    starred = [i for i, one in enumerate(targets) if isinstance(one, ast.Starred)]
    if starred:
        at, behind = starred[0], len(targets) - starred[0] - 1
        middle = values[at : len(values) - behind]
        values = [*values[:at], middle, *values[len(values) - behind :]]
    if len(values) != len(targets):
        raise Raised("ValueError", f"{len(values)} values for {len(targets)} names")
    for one, given in zip(targets, values, strict=True):
        assign(reader, one.value if isinstance(one, ast.Starred) else one, given, scope)


def _loops(
    reader: Interpreter, generators: list[ast.comprehension], scope: Scope, give: Any
) -> None:
    if not generators:
        give()
        return
    first = generators[0]
    over = reader.evaluate(first.iter, scope)
    if isinstance(over, Unknown):
        reader.undecided[f"{scope.module.name.rpartition('.')[2]}: {ast.unparse(first.iter)}"] = (
            None
        )
        return
    for value in _each(items(over)):
        assign(reader, first.target, value, scope)
        if all(reader.truth(reader.evaluate(t, scope), t, scope) for t in first.ifs):
            _loops(reader, generators[1:], scope, give)


def _each(value: Any) -> Iterator[Any]:
    return guarded(lambda: iter(value))  # type: ignore[no-any-return]


def _lambda(reader: Interpreter, node: ast.Lambda, scope: Scope) -> Any:
    return Function(reader, node, scope)


def _walrus(reader: Interpreter, node: ast.NamedExpr, scope: Scope) -> Any:
    scope.names[node.target.id] = value = reader.evaluate(node.value, scope)
    return value


def _yield(reader: Interpreter, node: ast.Yield, scope: Scope) -> Any:
    scope.yielded.append(None if node.value is None else reader.evaluate(node.value, scope))


def _yield_from(reader: Interpreter, node: ast.YieldFrom, scope: Scope) -> Any:
    value = reader.evaluate(node.value, scope)
    if not isinstance(value, Unknown):
        scope.yielded.extend(items(value) or ())


EXPRESSIONS: dict[type[ast.AST], Kind] = {
    ast.Constant: lambda reader, node, scope: node.value,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Call: _call,
    ast.BinOp: _binary,
    ast.Compare: _compare,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    ast.IfExp: _either,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.List: _sequence,
    ast.Tuple: _sequence,
    ast.Set: _sequence,
    ast.Dict: _dict,
    ast.JoinedStr: _text,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.Lambda: _lambda,
    ast.NamedExpr: _walrus,
    ast.Yield: _yield,
    ast.YieldFrom: _yield_from,
}
