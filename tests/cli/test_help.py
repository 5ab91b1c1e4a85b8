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
    room = len(lines[0]) - 2  # a blank on either side
    early = [
        above
        for above, below in itertools.pairwise(lines)
        if below.startswith("   ") and len(above.rstrip()) + len(below.split()[0]) < room
    ]
    assert not early
