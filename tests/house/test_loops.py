"""No loop over a list asks the list itself: `names.count(name)` for each name is quadratic."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.shards import ROOT

PACKAGE = ROOT / "vlmpack"
ASKING = ("count", "index")
"""Methods of a list that go through all of it."""
WRAPPERS = ("enumerate", "sorted", "reversed", "set", "list", "tuple")

QUADRATIC = """
twins = {name for name in names if names.count(name) > 1}
first = [names.index(name) for place, name in enumerate(names)]
for name in sorted(names):
    if [*names].count(name) > 1:
        print(name)
"""
LINEAR = """
counts = [text.count(mark) for mark in marks]
for name in names:
    found = other.index(name)
"""


def bare(node: ast.expr) -> str:
    """The list behind `enumerate(names)`, `{*names}` and `[*names]`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        return bare(node.args[0]) if node.func.id in WRAPPERS else ast.dump(node)
    if isinstance(node, ast.Set | ast.List | ast.Tuple) and len(node.elts) >= 1:
        [first, *_] = node.elts
        return bare(first.value) if isinstance(first, ast.Starred) else ast.dump(node)
    return ast.dump(node)


def quadratic(text: str) -> Iterator[int]:
    """Lines that ask a list about each of its items."""
    if not any(f".{method}(" in text for method in ASKING):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.For):
            over = {bare(node.iter)}
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            over = {bare(each.iter) for each in node.generators}
        else:
            continue
        for call in ast.walk(node):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in ASKING
                and bare(call.func.value) in over
            ):
                yield call.lineno


def test_no_loop_asks_the_list_that_it_goes_through() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in quadratic(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "count first (words.twice), or keep places in a dict"


def test_the_look_sees_each_way_to_write_it_and_no_other() -> None:
    assert len([*quadratic(QUADRATIC)]) == 3
    assert [*quadratic(LINEAR)] == []
