"""Options as fields of dataclasses: a command gets values of these, typer shows each option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from vlmpack.cli.options import takes


@dataclass(frozen=True)
class Colours:
    """Two options."""

    shade: Annotated[int, typer.Option("--shade", max=9, help="How dark.")] = 3
    is_warm: Annotated[bool, typer.Option("--warm", help="Red.")] = False


@dataclass(frozen=True)
class Sizes:
    """One option."""

    size: Annotated[float | None, typer.Option("--size")] = None


@pytest.fixture
def command():
    """(a program, what its command was called with)"""
    seen = []

    @takes(Colours, Sizes)
    def paint(
        wall: Annotated[str, typer.Argument(metavar="WALL")], colours: Colours, sizes: Sizes
    ) -> None:
        """Paint a wall."""
        seen.append((wall, colours, sizes))

    app = typer.Typer()
    app.command()(paint)
    return app, seen


def test_a_command_gets_one_value_of_each_class(command):
    app, seen = command
    assert CliRunner().invoke(app, ["north", "--shade", "5", "--warm"]).exit_code == 0
    assert CliRunner().invoke(app, ["south", "--size", "0.5"]).exit_code == 0
    assert seen == [
        ("north", Colours(5, is_warm=True), Sizes()),
        ("south", Colours(), Sizes(0.5)),
    ]


def test_typer_knows_each_option(command):
    app, seen = command
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(
        word in shown for word in ("Paint a wall.", "WALL", "--shade", "How dark.", "--warm")
    )
    assert CliRunner().invoke(app, ["north", "--shade", "10"]).exit_code == 2
    assert CliRunner().invoke(app, ["north", "--hue", "1"]).exit_code == 2
    assert seen == []
