"""Which tests are about a module: printed by `make test-map`.

A test file is about a module if it imports the module or something that it defines, names it in a
string (`monkeypatch.setattr("vlmpack...", ...)`), does so through a helper of tests/support or a
script beside it, or bears its name in the folder that mirrors its own. A module without such a file
is found through those modules of its room that import it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Found:
    """Where to look for tests of one module.

    Args:
        files: test files that name it, relative to the folder of the tests.
        through: modules of its room that import it and are named by a test file.
    """

    files: list[str]
    through: list[str] = field(default_factory=list)


class Names:
    """Which modules of a package its own files and the tests name.

    Args:
        root: the package's folder.
        tests: the tests' folder.
    """

    def __init__(self, root: Path, tests: Path) -> None:
        self.root, self.tests = root, tests
        self.dotted: dict[Path, list[str]] = {}
        self.handed_on: dict[Path, dict[str, str]] = {}
        self.modules: dict[str, Path] = {}
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            self.modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def find(self) -> dict[str, Found]:
        """Every module that has code."""
        files: dict[str, set[str]] = {name: set() for name in self.modules}
        for path in sorted(self.tests.rglob("test_*.py")):
            here = path.relative_to(self.tests)
            if here.parts[0] == "house":  # it names modules to look for their tests
                continue
            twin = ".".join((self.root.name, *here.parent.parts, here.stem.removeprefix("test_")))
            for name in {*self._of_test(path), twin} & files.keys():
                files[name].add(str(here))
        found = {}
        for name, path in self.modules.items():
            if all(isinstance(node, ast.Expr) for node in _parsed(path).body):
                continue
            room = name.split(".")[:2]
            through = [
                other
                for other, imported in self.imports.items()
                if name in imported and other.split(".")[:2] == room and files[other]
            ]
            found[name] = Found(sorted(files[name]), [] if files[name] else through)
        return found

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> those that it names, itself left out."""
        return {
            name: set(self._of_file(path)) - {name}
            for name, path in self.modules.items()
            if path.name != "__init__.py"
        }

    def _of_test(self, path: Path) -> Iterator[str]:
        """What a test file names, and what the helpers that it imports do."""
        seen, waiting = {path}, [path]
        while waiting:
            current = waiting.pop()
            yield from self._of_file(current)
            for helper in self._helpers(current) - seen:
                seen.add(helper)
                waiting.append(helper)

    def _helpers(self, path: Path) -> set[Path]:
        """What it imports of tests/support, and the scripts there or beside it that it names."""
        support, names = self.tests / "support", self._dotted(path)
        files = {support / f"{name.split('.')[1]}.py" for name in names if "support." in name[:8]}
        scripts = {name for name in names if name.endswith(".py")}
        files |= {folder / name for folder in (support, path.parent) for name in scripts}
        return {file for file in files if file.exists()}

    def _of_file(self, path: Path) -> Iterator[str]:
        yield from self._owners(self._dotted(path))

    def _dotted(self, path: Path) -> list[str]:
        if path not in self.dotted:
            self.dotted[path] = list(_dotted_names(_parsed(path), self.root.name))
        return self.dotted[path]

    def _owners(self, names: Iterable[str]) -> Iterator[str]:
        """The module of each dotted name; a package hands on where its own imports say."""
        for name in names:
            owner, rest = name, ""
            while owner not in self.modules and "." in owner:
                owner, _, rest = owner.rpartition(".")
            if owner not in self.modules:
                continue
            yield owner
            source = self._handed_on(self.modules[owner]).get(rest)
            if source is not None:
                yield from self._owners([source])

    def _handed_on(self, path: Path) -> dict[str, str]:
        """What an `__init__` imports: name -> where from."""
        if path.name != "__init__.py":
            return {}
        if path not in self.handed_on:
            self.handed_on[path] = {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in ast.walk(_parsed(path))
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
        return self.handed_on[path]


def _dotted_names(tree: ast.Module, package: str) -> Iterator[str]:
    """What a file imports, and what of the package its code and its strings name."""
    in_text = re.compile(rf"\b{package}(?:\.\w+)+")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == package:
                yield f"{package}.{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from in_text.findall(node.value)
            if re.fullmatch(r"\w+\.py", node.value):
                yield node.value


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def lines_about(found: dict[str, Found], wanted: str) -> Iterator[str]:
    """The modules whose name contains a text, and their tests."""
    for name, where in found.items():
        if wanted in name:
            yield name
            yield from (f"    {file}" for file in where.files)
            yield from (f"    through {module}" for module in where.through)


if __name__ == "__main__":
    from support.shards import ROOT

    everything = Names(ROOT / "vlmpack", ROOT / "tests").find()
    print("\n".join(lines_about(everything, sys.argv[1] if len(sys.argv) > 1 else "")))
