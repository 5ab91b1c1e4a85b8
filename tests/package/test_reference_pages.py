"""docs/reference is what `make reference-pages` writes: every key of a recipe, every command."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import typer

from vlmpack.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/reference"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "tools/reference_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_pages_are_those_that_the_code_makes(tool):
    for name, text in tool.pages().items():
        assert (FOLDER / name).read_text() == text, "run `make reference-pages`"


def test_every_key_and_every_command_has_its_row(tool):
    recipe, commands = tool.recipe_page(), tool.command_page()
    keys = tool.Keys(tool.json_schema())
    for name, child, _ in keys.children(keys.schema):
        assert f"| `{name}` |" in recipe or f"## {name}\n" in recipe
        for below, _, _ in keys.children(child):
            assert f"| `{name}.{below}` |" in recipe or name in ("validation", "test")
    assert "| `training.seq_length` | integer | required |" in recipe
    wanted = {path for path, _ in tool.commands(typer.main.get_command(app), "vlmpack")}
    assert set(re.findall(r"^## (.*)$", commands, re.MULTILINE)) == wanted and len(wanted) > 20
    assert "`--world-size`" in commands
    assert "| `--choices`, `--no-choices` |" in commands
