"""A docstring is a sentence that stands alone: nobody has to read the name to know its subject."""

from __future__ import annotations

import ast
import re

import pytest
from support.shards import ROOT

FRAGMENT = re.compile(r"Of (?!each pair, drop)|\w+\.$|\(?\w, \w\)\.$")


def docstrings():
    """Every docstring, and every string that documents a constant or a field, with its place."""
    for path in sorted(p for room in ("vlmpack", "tools") for p in (ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies = [n.body for n in ast.walk(tree) if isinstance(getattr(n, "body", None), list)]
        for statement in (each for body in bodies for each in body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield f"{path.relative_to(ROOT)}:{statement.lineno}", text


@pytest.mark.slow
def test_no_docstring_is_a_fragment():
    found = list(docstrings())
    assert len(found) > 1500
    assert [(place, text) for place, text in found if FRAGMENT.match(text)] == []
