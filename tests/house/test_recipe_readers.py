"""A whole recipe ends at a few doors: `build` makes four values of it, and each room takes its own.

A recipe is also what carries one: a class with a field of that type, or of a type that carries one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shards import ROOT

ANY_FILE = ("recipe", "build", "cli")
"""Rooms in which every file may read one."""

DOORS = {
    "api.py": "runs a recipe that a program hands over",
    "forecast/longest.py": "takes the recipe's layouts one after the other",
    "forecast/measure.py": "measures runs of a recipe, as it is and changed",
    "forecast/open.py": "opens a recipe to plan its run",
    "proof/rows/opening.py": "opens a recipe to look at one of its rows",
    "proof/verify/run.py": "opens a recipe to verify it",
    "run/export.py": "reads the recipe of a run folder",
    "run/launch.py": "takes a recipe to the end of its run",
    "run/packs.py": "opens a recipe to save its rows",
    "run/place.py": "compares a recipe with that of the run folder",
    "run/reference.py": "opens a recipe to compute its reference",
    "run/replay.py": "opens the recipe of a dump's run once more",
    "run/sample.py": "opens a recipe to draw answers to its prompts",
}
"""File -> why a recipe is handed to it."""


def _names(node: ast.AST | None) -> Iterator[str]:
    """The names in an annotation, those in quotes too."""
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            try:
                yield from _names(ast.parse(part.value, mode="eval"))
            except SyntaxError:
                continue


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    of = function.args
    for argument in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg):
        if argument is not None:
            yield from _names(argument.annotation)


def _fields(made: ast.ClassDef) -> set[str]:
    """The names in the types of a class's fields, of what makes it, and of its bases."""
    found = {name for base in made.bases for name in _names(base)}
    for node in made.body:
        if isinstance(node, ast.AnnAssign):
            found.update(_names(node.annotation))
        elif isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__"):
            found.update(_arguments(node))
            for inner in ast.walk(node):
                if isinstance(inner, ast.AnnAssign):
                    found.update(_names(inner.annotation))
    return found


Class = tuple[str, str]
"""A class by its file and name."""

RECIPE = "Recipe"


class Package:
    """The files of a package, and which class a name stands for in each."""

    def __init__(self, root: Path) -> None:
        self.trees = {
            path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in root.rglob("*.py")
        }
        self._defined = {
            name: {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
            for name, tree in self.trees.items()
        }
        self._imported = {name: dict(self._imports(tree)) for name, tree in self.trees.items()}

    def _imports(self, tree: ast.AST) -> Iterator[tuple[str, Class]]:
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            package, _, rest = (node.module or "").partition(".")
            if package != "vlmpack":
                continue
            stem = rest.replace(".", "/")
            file = f"{stem}.py" if f"{stem}.py" in self.trees else f"{stem}/__init__.py"
            for each in node.names:
                yield each.asname or each.name, (file.removeprefix("/"), each.name)

    def of_name(self, file: str, name: str) -> Class:
        """The class that a name stands for; one that is found nowhere stands by its name."""
        while name not in self._defined.get(file, ()):
            if name not in self._imported.get(file, ()):
                return "", name
            file, name = self._imported[file][name]
        return file, name


def handed(root: Path) -> dict[str, set[Class]]:
    """File -> what carries a recipe and is a parameter, a result or a field there."""
    package = Package(root)
    said: dict[str, set[Class]] = {}
    fields: dict[Class, set[Class]] = {}
    for file, tree in package.trees.items():
        said[file] = set()
        for node in ast.walk(tree):
            names: set[str] = set()
            if isinstance(node, ast.ClassDef):
                names = _fields(node)
                fields[file, node.name] = {package.of_name(file, name) for name in names}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {*_arguments(node), *_names(node.returns)}
            said[file] |= {package.of_name(file, name) for name in names}
    carriers = {one for each in said.values() for one in each if one[1] == RECIPE}
    while more := {one for one, of in fields.items() if of & carriers} - carriers:
        carriers |= more
    return {file: of & carriers for file, of in said.items() if of & carriers}


def outside(root: Path) -> set[str]:
    """The files outside of those rooms that are handed a recipe, or what carries one."""
    return {name for name in handed(root) if name.split("/")[0] not in ANY_FILE}


@pytest.mark.slow
def test_a_whole_recipe_is_handed_to_the_doors_alone() -> None:
    assert outside(ROOT / "vlmpack") == DOORS.keys()


def _using(module: str, name: str) -> str:
    return f"from vlmpack.{module} import {name}\n"


def test_what_carries_a_recipe_is_found_however_deep_it_lies(tmp_path: Path) -> None:
    files = {
        "build/setup.py": "class Setup:\n    recipe: Recipe\n",
        "build/bag.py": _using("build.setup", "Setup")
        + "class Bag(NamedTuple):\n    setups: dict[str, 'Setup | None']\n",
        "build/made.py": _using("build.bag", "Bag")
        + "class Made:\n    def __init__(self, bag: Bag) -> None: ...\n",
        "build/kind.py": _using("build.made", "Made") + "class Kind(Made): ...\n",
        "build/__init__.py": _using("build.made", "Made"),
        "training/loop.py": "def run(recipe: Recipe) -> None: ...\n",
        "training/named.py": "def run(recipe: schema.Recipe) -> None: ...\n",
        "training/quoted.py": "def run(*, recipe: 'Recipe') -> None: ...\n",
        "training/held.py": _using("build.setup", "Setup") + "class Loop:\n    setup: Setup\n",
        "data/bag.py": _using("build.bag", "Bag") + "def run(bags: Sequence[Bag]) -> None: ...\n",
        "data/made.py": _using("build", "Made") + "def run() -> Made: ...\n",
        "data/kind.py": _using("build.kind", "Kind") + "def run(kind: Kind) -> None: ...\n",
        "data/alias.py": "from vlmpack.build.bag import Bag as B\ndef run(b: B): ...\n",
        "data/other.py": "class Setup: ...\ndef run(setup: Setup): ...\n",
        "data/plain.py": "def run(section: ModelSection) -> Loader: ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    quiet = {"data/plain.py", "data/other.py"}
    assert outside(tmp_path) == {name for name in files if not name.startswith("build/")} - quiet
