"""No function, module or room of the package outgrows a reader.

What the house tests measure of a tree of Python files.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from support.shards import ROOT


def long_functions(root: Path, most: int) -> dict[str, int]:
    """The functions of more lines than `most`, from `def` to the last one."""
    found = {}
    for path in long_modules(root, most):
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > most:
                    found[f"{path}:{node.lineno} {node.name}"] = lines
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


PACKAGE, TOOLS = ROOT / "vlmpack", ROOT / "tools"
FUNCTION_LINES = 77
MODULE_LINES = 600
ROOM_SHARE = 0.22


def test_no_function_is_too_long() -> None:
    assert long_functions(PACKAGE, FUNCTION_LINES) | long_functions(TOOLS, FUNCTION_LINES) == {}


def test_no_module_is_too_long() -> None:
    assert long_modules(PACKAGE, MODULE_LINES) | long_modules(TOOLS, MODULE_LINES) == {}


def test_no_room_is_too_large() -> None:
    shares = room_shares(PACKAGE)
    assert len(shares) > 15
    assert {room: share for room, share in shares.items() if share > ROOM_SHARE} == {}


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """Two rooms of 60 and 40 lines, and a module of none."""
    body = "".join(f"    step({number})\n" for number in range(19))
    (tmp_path / "large/inner").mkdir(parents=True)
    (tmp_path / "small").mkdir()
    (tmp_path / "large/a.py").write_text(f"def first():\n{body}async def second():\n{body}")
    (tmp_path / "large/inner/b.py").write_text("class C:\n    def third(self): ...\n" * 10)
    (tmp_path / "small/c.py").write_text("x = 1\n" * 40)
    (tmp_path / "alone.py").write_text("")
    return tmp_path


def test_one_line_too_many_is_found(made_up: Path) -> None:
    functions = {"large/a.py:1 first": 20, "large/a.py:21 second": 20}
    assert long_functions(made_up, 19) == functions
    assert long_functions(made_up, 20) == {}
    assert long_modules(made_up, 39) == {"large/a.py": 40, "small/c.py": 40}
    assert long_modules(made_up, 40) == {}


def test_a_room_is_all_that_lies_in_it(made_up: Path) -> None:
    assert room_shares(made_up) == {"large": 0.6, "small": 0.4}
