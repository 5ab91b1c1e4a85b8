"""What the house tests measure of a tree of Python files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path


def long_functions(root: Path, most: int) -> dict[str, int]:
    """The functions of more lines than `most`, from `def` to the last one."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > most:
                    found[f"{path.relative_to(root)}:{node.lineno} {node.name}"] = lines
    return found


def long_modules(root: Path, most: int) -> dict[str, int]:
    """The files of more lines than `most`."""
    sizes = {str(path.relative_to(root)): _lines(path) for path in sorted(root.rglob("*.py"))}
    return {name: lines for name, lines in sizes.items() if lines > most}


def room_shares(root: Path) -> dict[str, float]:
    """First-level package -> its share of the tree's lines; a module of the root is no room."""
    sizes: dict[str, int] = defaultdict(int)
    for path in root.rglob("*.py"):
        sizes[path.relative_to(root).parts[0]] += _lines(path)
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items() if not name.endswith(".py")}


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
