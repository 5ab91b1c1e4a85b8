"""Pages name the rooms, files and commands that exist; architecture and CONTRIBUTING every room."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer

from vlmpack.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vlmpack"
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
MODULES = {path.stem for path in PACKAGE.glob("[!_]*.py")}


def block(text, first):
    """The fenced block that begins with the line `first`, without that line."""
    return re.search(rf"^```\n{re.escape(first)}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]


def test_the_tree_in_architecture_is_the_package_and_a_sentence_each():
    lines = re.findall(r"^  (\w+)(/|\.py) +(\S.*)$", block(ARCHITECTURE, "vlmpack/"), re.MULTILINE)
    assert {name for name, kind, _ in lines if kind == "/"} == ROOMS
    assert {name for name, kind, _ in lines if kind == ".py"} == MODULES
    assert len(lines) == len(ROOMS | MODULES) > 25
    for name, _, sentence in lines:
        assert sentence.endswith(".") and len(sentence.split()) > 1, name


def test_the_four_walks_are_short():
    walks = re.findall(r"^## (A .*?)$(.*?)(?=^## )", ARCHITECTURE, re.DOTALL | re.MULTILINE)
    assert [re.split(r"\W", name)[1] for name, _ in walks] == [
        "bin",
        "step",
        "checkpoint",
        "launch",
    ]
    for name, text in walks:
        assert len([line for line in text.splitlines() if line.strip()]) <= 15, name


def test_the_layers_in_contributing_are_those_that_the_linter_holds():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (held,) = (c["layers"] for c in contracts["contracts"] if c.get("containers") == ["vlmpack"])
    drawn = [line.split("  ")[0].strip() for line in block(CONTRIBUTING, "vlmpack").splitlines()]
    assert [name for name in drawn if name] == held
    named = {name for layer in held for name in layer.split(" | ")}
    assert named == ROOMS | MODULES


def test_the_first_page_quotes_the_whole_demo_recipe():
    recipe = (ROOT / "recipes" / "digits-demo.yaml").read_text()
    assert recipe[recipe.index("model:") :].rstrip() in (ROOT / "docs/start.md").read_text()


def anchors(page):
    """What a heading of a page is linked by."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name) if name else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page):
    """`a/b.py`, in backticks, from the root or from vlmpack/; `a/b.py::name` has that name."""
    for place, name in re.findall(r"`([\w/.-]+\.py)(?:::(\w+)[\w.]*)?`", page.read_text()):
        if "NAME" in place:  # of a file that is to be written
            continue
        (found,) = [path for path in (ROOT / place, PACKAGE / place) if path.is_file()] or [None]
        if "/" not in place and found is None:
            assert list(PACKAGE.rglob(place)), f"no module is called {place}"
            continue
        assert found is not None, place
        assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b", found.read_text(), re.MULTILINE), (
            f"{place} has no {name}" if name else place
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_shows_exists(page):
    root = typer.main.get_command(app)
    shown = r"(?:^|^ +|`|-m )vlmpack ([a-z][a-z-]*)(?: ([a-z-]+))?"
    code = re.sub(r"\bfrom vlmpack import\b", "", page.read_text())
    fenced = "\n".join(re.findall(r"^ *```.*?^ *```$", code, re.DOTALL | re.MULTILINE))
    quoted = "\n".join(re.findall(r"`vlmpack[^`]*`", code))
    for first, second in re.findall(shown, f"{fenced}\n{quoted}", re.MULTILINE):
        assert first in root.commands, first
        group = getattr(root.commands[first], "commands", None)
        assert group is None or not second or second in group, (first, second)
