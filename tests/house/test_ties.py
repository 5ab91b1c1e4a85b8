"""How large the package is, and how closely its modules are tied: imports by lines of code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shards import ROOT

MOST_TIES = 45.0
"""Per 1,000 lines of code. Where one idea lies in several files, they import each other's names."""
MOST_MODULES, MOST_CODE_LINES = 447, 69_448
"""A change that adds lines moves the second by as many, in the commit that adds them."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def num_code_lines(text: str) -> int:
    """The lines that are no blank, no docstring and no comment."""
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for line in node.body if isinstance(node, DOCUMENTED) else ():
            is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
            if is_text and isinstance(line.value.value, str):
                words.update(range(line.lineno, (line.end_lineno or line.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(
        bool(line) and not line.startswith("#") and number not in words for number, line in lines
    )


def own_imports(text: str, package: str) -> Iterator[str]:
    """The modules of the package that are imported, wherever; those for type checkers are not."""
    unseen: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unseen.update(ast.walk(node))
        elif isinstance(node, ast.ImportFrom) and node not in unseen:
            yield from [node.module or ""] * ((node.module or "").partition(".")[0] == package)
        elif isinstance(node, ast.Import) and node not in unseen:
            yield from (x.name for x in node.names if x.name.partition(".")[0] == package)


def ties(package: Path) -> float:
    """Imports of the package's own per 1,000 lines of its code."""
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    imports = sum(1 for text in texts for _ in own_imports(text, package.name))
    return 1000 * imports / sum(map(num_code_lines, texts))


@pytest.mark.slow
def test_the_package_is_loosely_tied() -> None:
    assert 20 < ties(ROOT / "vlmpack") < MOST_TIES


@pytest.mark.slow
def test_the_package_keeps_its_budget() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "vlmpack").rglob("*.py")]
    assert 200 < len(texts) <= MOST_MODULES
    lines = sum(map(num_code_lines, texts))
    assert MOST_CODE_LINES - 2000 < lines <= MOST_CODE_LINES, "set MOST_CODE_LINES to what it takes"


def test_ties_are_counted(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "a.py").write_text(
        '"""Words."""\n\nfrom typing import TYPE_CHECKING\n\nimport own.b\nfrom own.c import x\n\n'
        "if TYPE_CHECKING:\n    from own.d import y\n\n# why\ndef f():\n"
        '    """More\n    words."""\n    from own import e\n\n    return "no docstring"\n'
    )
    assert num_code_lines((package / "a.py").read_text()) == 8
    assert ties(package) == 1000 * 3 / 8
    (package / "b.py").write_text("from stranger import own\n\nx = 1\n")
    assert ties(package) == 1000 * 3 / 10
