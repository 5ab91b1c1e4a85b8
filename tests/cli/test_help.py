"""Texts of `--help` fill their lines; a line of the source does not end one of the terminal."""

from __future__ import annotations

import itertools

import pytest
from typer.testing import CliRunner

from vlmpack.cli.app import app


@pytest.mark.parametrize("of", [(), ("data",), ("recipe",)])
def test_no_line_of_a_command_ends_early(of: tuple[str, ...]) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*of, "--help"]).output
    lines = [line.strip("│\n") for line in shown.partition("Commands")[2].splitlines()[1:-1]]
    assert len(lines) > 3, "no commands were found"
    goes_on = [pair for pair in itertools.pairwise(lines) if pair[1].startswith("   ")]
    assert goes_on, "no text takes two lines"
    room = len(lines[0]) - 2  # a blank on either side
    assert not [a for a, b in goes_on if len(a.rstrip()) + len(b.split()[0]) < room]
