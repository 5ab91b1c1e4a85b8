"""Imports of the package go down its layers and in no circle; pyproject.toml says which layers.

The copies of the package are looked at by the linter alone, never imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.shards import ROOT

LINT = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
)


def lint(folder: Path) -> tuple[int, str]:
    """The exit code, and what the linter says of the package in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's sources and its contracts, to break."""
    for name in ("vlmpack", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def add_import(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")


def test_every_contract_is_kept() -> None:
    code, said = lint(ROOT)
    assert code == 0, said
    assert "0 broken" in said


def test_an_import_that_climbs_is_found(copy: Path) -> None:
    add_import(copy / "vlmpack/packing/balance.py", "from vlmpack.report import page")
    code, said = lint(copy)
    assert code == 1
    assert "Imports go down the layers BROKEN" in said
    assert "vlmpack.packing is not allowed to import vlmpack.report" in said


def test_a_circle_inside_a_room_is_found(copy: Path) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        (copy / f"vlmpack/packing/{name}.py").write_text(f"from vlmpack.packing import {other}\n")
    code, said = lint(copy)
    assert code == 1
    assert "No cycles between the modules of a layer BROKEN" in said
    assert "1 broken" in said


def test_a_tool_in_the_package_is_found(copy: Path) -> None:
    add_import(copy / "vlmpack/packing/balance.py", "from tools.sweep import run")
    code, said = lint(copy)
    assert code == 1
    assert "The package needs no tool BROKEN" in said


def test_a_room_that_no_layer_names_is_found(copy: Path) -> None:
    (copy / "vlmpack/attic").mkdir()
    (copy / "vlmpack/attic/__init__.py").write_text("")
    code, said = lint(copy)
    assert code == 1
    assert "attic" in said
