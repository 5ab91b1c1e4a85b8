"""What statements do, one function a kind of node."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.servers.expressions import EXPRESSIONS, assign, guarded, items, operate
from tools.servers.interpreter import Interpreter, Kind
from tools.servers.values import (
    Class,
    Function,
    Instance,
    Jump,
    Raised,
    Scope,
    Unknown,
    Unread,
    last_name,
)


def _assign(reader: Interpreter, node: ast.Assign, scope: Scope) -> None:
    value = reader.evaluate(node.value, scope)
    for target in node.targets:
        assign(reader, target, value, scope)


def _annotated(reader: Interpreter, node: ast.AnnAssign, scope: Scope) -> None:
    if node.value is not None:
        assign(reader, node.target, reader.evaluate(node.value, scope), scope)


def _augmented(reader: Interpreter, node: ast.AugAssign, scope: Scope) -> None:
    before = reader.evaluate(node.target, scope)
    value = reader.evaluate(node.value, scope)
    if isinstance(before, list) and isinstance(value, list):
        before.extend(value)
        return
    assign(reader, node.target, operate(reader, type(node.op), before, value), scope)


def _if(reader: Interpreter, node: ast.If, scope: Scope) -> None:
    holds = reader.truth(reader.evaluate(node.test, scope), node.test, scope)
    reader.execute(node.body if holds else node.orelse, scope)


def _breaks(reader: Interpreter, body: list[ast.stmt], scope: Scope) -> bool:
    """Run the body of a loop once; whether it leaves the loop."""
    try:
        reader.execute(body, scope)
    except Jump as jump:
        if jump.kind not in ("break", "continue"):
            raise
        return jump.kind == "break"
    return False


def _for(reader: Interpreter, node: ast.For, scope: Scope) -> None:
    over = reader.evaluate(node.iter, scope)
    if isinstance(over, Unknown):
        text = f"{scope.module.name.rpartition('.')[2]}: {ast.unparse(node.iter)}"
        reader.undecided[text] = None
        return
    for value in guarded(lambda: iter(items(over))):
        assign(reader, node.target, value, scope)
        if _breaks(reader, node.body, scope):
            return
    reader.execute(node.orelse, scope)


def _while(reader: Interpreter, node: ast.While, scope: Scope) -> None:
    for _ in range(10_000):
        if not reader.truth(reader.evaluate(node.test, scope), node.test, scope):
            return
        if _breaks(reader, node.body, scope):
            return
    raise Unread(f"while {ast.unparse(node.test)}: without end")


def _match(reader: Interpreter, node: ast.Match, scope: Scope) -> None:
    """The first case of the value's class; `case _` for what is not known."""
    value = reader.evaluate(node.subject, scope)
    for case in node.cases:
        pattern = case.pattern
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
            reader.execute(case.body, scope)
            return
        if not isinstance(pattern, ast.MatchClass):
            raise Unread(f"case {ast.unparse(pattern)}")
        name = ast.unparse(pattern.cls).rpartition(".")[2]
        if isinstance(value, Instance) and last_name(value.cls) == name:
            for key, inner in zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True):
                if isinstance(inner, ast.MatchAs) and inner.name:
                    scope.names[inner.name] = reader.get(value, key)
            reader.execute(case.body, scope)
            return


def _with(reader: Interpreter, node: ast.With, scope: Scope) -> None:
    for item in node.items:
        value = reader.evaluate(item.context_expr, scope)
        if item.optional_vars is not None:
            assign(reader, item.optional_vars, value, scope)
    reader.execute(node.body, scope)


def _try(reader: Interpreter, node: ast.Try, scope: Scope) -> None:
    try:
        reader.execute(node.body, scope)
    except Raised as raised:
        for handler in node.handlers:
            names = ast.unparse(handler.type) if handler.type else "Exception"
            if raised.kind in names or "Exception" in names:
                if handler.name:
                    scope.names[handler.name] = Unknown("error")
                reader.execute(handler.body, scope)
                break
        else:
            raise
    else:
        reader.execute(node.orelse, scope)
    reader.execute(node.finalbody, scope)


def _raise(reader: Interpreter, node: ast.Raise, scope: Scope) -> None:
    if node.exc is None:
        raise Raised("Exception", "raised again")
    kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    args = node.exc.args if isinstance(node.exc, ast.Call) else []
    message = reader.evaluate(args[0], scope) if args else ""
    raise Raised(ast.unparse(kind).rpartition(".")[2], message)


def _assert(reader: Interpreter, node: ast.Assert, scope: Scope) -> None:
    value = reader.evaluate(node.test, scope)
    if not isinstance(value, Unknown) and not reader.truth(value, node.test, scope):
        raise Raised("AssertionError", ast.unparse(node.test))


def _import(reader: Interpreter, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
    for alias in node.names:
        name = (alias.asname or alias.name).partition(".")[0]
        scope.names[name] = reader._imported(scope.module, node, name)


def _function(reader: Interpreter, node: ast.FunctionDef, scope: Scope) -> None:
    scope.names[node.name] = Function(reader, node, scope)


def _class(reader: Interpreter, node: ast.ClassDef, scope: Scope) -> None:
    scope.names[node.name] = Class(reader, scope.module, node)


def _jump(kind: str) -> Callable[..., None]:
    def jump(reader: Interpreter, node: Any, scope: Scope) -> None:
        value = getattr(node, "value", None)
        raise Jump(kind, None if value is None else reader.evaluate(value, scope))

    return jump


def _delete(reader: Interpreter, node: ast.Delete, scope: Scope) -> None:
    for target in node.targets:
        if isinstance(target, ast.Attribute):
            owner = reader.evaluate(target.value, scope)
            if isinstance(owner, Instance):
                owner.attributes.pop(target.attr, None)
        elif isinstance(target, ast.Name):
            scope.names.pop(target.id, None)


_STATEMENTS: dict[type[ast.AST], Kind] = {
    ast.Expr: lambda reader, node, scope: reader.evaluate(node.value, scope),
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.While: _while,
    ast.With: _with,
    ast.Match: _match,
    ast.Try: _try,
    ast.Raise: _raise,
    ast.Assert: _assert,
    ast.Import: _import,
    ast.ImportFrom: _import,
    ast.FunctionDef: _function,
    ast.ClassDef: _class,
    ast.Return: _jump("return"),
    ast.Break: _jump("break"),
    ast.Continue: _jump("continue"),
    ast.Delete: _delete,
    ast.Pass: lambda reader, node, scope: None,
    ast.Nonlocal: lambda reader, node, scope: None,
    ast.Global: lambda reader, node, scope: None,
}


def reader_of(
    root: Path, package: str, hooks: Mapping[str, Callable[..., Any]], followed: tuple[str, ...]
) -> Interpreter:
    """A reader that follows all kinds of nodes; the arguments are those of `Interpreter`."""
    return Interpreter(root, package, hooks, followed, _STATEMENTS | EXPRESSIONS)
