"""Texts of `--help` fill their lines; a line of the source does not end one of the terminal. The
help of every command ends with an example that can be run."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.recipe import json_schema

ROOT_COMMAND = get_command(app)


def every_command(command: Any, *words: str) -> list[tuple[str, Any]]:
    """The words of each command and group, and the thing itself."""
    below = command.commands.items() if isinstance(command, TyperGroup) else ()
    return [(" ".join(words), command), *(f for n, c in below for f in every_command(c, *words, n))]


COMMANDS = dict(every_command(ROOT_COMMAND, "vlmpack"))


def parse(line: str) -> str:
    """The words of the command that a command line runs; fails where it does not parse."""
    words = shlex.split(line.partition(" > ")[0])
    context = ROOT_COMMAND.make_context(words[0], words[1:])
    while isinstance(context.command, TyperGroup):
        left = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, left)
        context = command.make_context(name, rest, parent=context)
    for override in context.params.get("overrides") or ():
        known: Any = json_schema()
        for key in override.partition("=")[0].split("."):
            reference = known["properties"][key].get("$ref", "")
            known = json_schema()["$defs"].get(reference.rpartition("/")[2], {})
    return str(context.command_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example_that_parses(name: str) -> None:
    found = re.fullmatch(r"Example: `(vlmpack .+)`", COMMANDS[name].epilog or "")
    assert found, "no example"
    ran = parse(found[1])
    assert ran == name or (isinstance(COMMANDS[name], TyperGroup) and ran.startswith(name))
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*name.split()[1:], "--help"]).output
    assert found[1] in shown


@pytest.mark.parametrize(
    "line",
    [
        "vlmpack plan recipe.yaml --world",
        "vlmpack plan",
        "vlmpack data plan recipe.yaml",
        "vlmpack finetune recipe.yaml training.max_step=20",
    ],
)
def test_an_example_that_is_wrong_would_be_seen(line: str) -> None:
    with pytest.raises((SystemExit, Exception)) as caught:
        parse(line)
    assert isinstance(caught.value, KeyError) or hasattr(caught.value, "exit_code")


@pytest.mark.parametrize("of", [(), ("data",), ("recipe",)])
def test_no_line_of_a_command_ends_early(of: tuple[str, ...]) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*of, "--help"]).output
    table = shown.partition("Commands")[2].partition("╰")[0]
    lines = [line.strip("│\n") for line in table.splitlines()[1:]]
    assert len(lines) > 3, "no commands were found"
    goes_on = [pair for pair in itertools.pairwise(lines) if pair[1].startswith("   ")]
    assert goes_on, "no text takes two lines"
    room = len(lines[0]) - 2  # a blank on either side
    assert not [a for a, b in goes_on if len(a.rstrip()) + len(b.split()[0]) < room]
