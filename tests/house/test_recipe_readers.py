"""A whole recipe is read by few: it is checked, entered and set up, and parts of it go on.

What is behind `build.setup.Setup` takes that, a section, or finished objects.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.shards import ROOT

ANY_FILE = ("recipe", "build", "cli")
"""Rooms in which every file may read one."""

DOORS = {
    "__init__.py",
    "api.py",
    "data/modes/__init__.py",
    "forecast/batch.py",
    "forecast/make.py",
    "forecast/measure/choices.py",
    "forecast/measure/measure.py",
    "forecast/measure/surroundings.py",
    "forecast/measure/trials.py",
    "forecast/open.py",
    "proof/rows/opening.py",
    "proof/verify/run.py",
    "run/export.py",
    "run/launch.py",
    "run/packs.py",
    "run/place.py",
    "run/reference.py",
}


def readers(root: Path) -> set[str]:
    """The files that import the class, outside of those rooms."""
    found = set()
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        ours = [node for node in imports if (node.module or "").startswith("vlmpack.recipe")]
        if any(alias.name == "Recipe" for node in ours for alias in node.names):
            found.add(str(name))
    return {name for name in found if name.split("/")[0] not in ANY_FILE}


@pytest.mark.slow
def test_a_whole_recipe_is_read_at_the_doors_alone() -> None:
    assert readers(ROOT / "vlmpack") <= DOORS


def test_a_reader_more_is_found(tmp_path: Path) -> None:
    inside = tmp_path / "training"
    inside.mkdir()
    (inside / "loop.py").write_text("from vlmpack.recipe.schema import ModelSection, Recipe\n")
    (inside / "step.py").write_text("from vlmpack.recipe.schema import ModelSection\n")
    assert readers(tmp_path) == {"training/loop.py"}
