"""A word that is no command is answered with near ones, of whatever group."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.cli.options import FOREIGN

NEAR = {
    "finetun": ["finetune"],
    "stats": ["data stats"],
    "data_stats": ["data stats"],
    "check": ["recipe check"],
    "show": ["recipe show", "data show"],
    "data sho": ["data show"],
    "data chek": ["recipe check", "recipe schema"],
    "data plan": ["plan"],
    "recipe nwe": ["recipe new"],
    "recipe lint": ["data lint"],
    **{word: [ours] for word, ours in FOREIGN.items()},
}


def said(words: str) -> str:
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, words.split())
    assert ended.exit_code == 2, ended.output
    return ended.output


@pytest.mark.parametrize("words", NEAR)
def test_near_commands_are_named(words: str) -> None:
    output = said(words)
    asked = " or ".join(f"'vlmpack {near}'" for near in NEAR[words])
    assert f"No such command {words.split()[-1]!r}. Did you mean {asked}?" in output


@pytest.mark.parametrize("near", sorted(set(FOREIGN.values())))
def test_what_is_named_for_a_foreign_word_exists(near: str) -> None:
    assert CliRunner().invoke(app, [*near.split(), "--help"]).exit_code == 0


def test_a_word_that_is_near_nothing_gets_the_list() -> None:
    assert "No such command 'qqq'; expected one of lint, convert, stats, show, audit." in said(
        "data qqq"
    )


@pytest.mark.parametrize(
    ("words", "near"),
    [("plan --worldsize 2 r", "--world-size"), ("data lint --modle m", "--model")],
)
def test_near_options_are_named(words: str, near: str) -> None:
    assert f"(Possible options: {near}" in said(words)
