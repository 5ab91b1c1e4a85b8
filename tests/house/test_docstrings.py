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


def listed(package):
    """Names at the beginning of a line in a package's docstring, with a text some spaces behind."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    for names in re.findall(r"^([a-z_]+(?:, [a-z_]+)*) {2,}\S", text, re.MULTILINE):
        yield from names.split(", ")


def test_the_modules_that_a_package_lists_are_there(tmp_path):
    packages = sorted(path.parent for path in (ROOT / "vlmpack").rglob("__init__.py"))
    found = {package: list(listed(package)) for package in packages}
    assert sum(map(len, found.values())) > 80
    there = {package: {path.stem for path in package.iterdir()} for package in packages}
    assert {str(p): gone for p in packages if (gone := {*found[p]} - there[p])} == {}
    (tmp_path / "__init__.py").write_text('"""A room.\n\nlost, kept  two of them\n"""\n')
    assert [*listed(tmp_path)] == ["lost", "kept"]


@pytest.mark.slow
def test_no_docstring_is_a_fragment():
    found = list(docstrings())
    assert len(found) > 1500
    assert [(place, text) for place, text in found if FRAGMENT.match(text)] == []
