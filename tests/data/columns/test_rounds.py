"""Rounds as objects: Cauldron's and ms-swift's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.columns.form import RecordForm, find_form, read_turns
from vlmpack.errors import DataError

ROUND = {"user": "Q", "assistant": "A", "source": "web"}


@pytest.mark.parametrize("as_text", [False, True])
def test_rounds_are_turns(as_text: bool) -> None:
    cauldron: Any = [ROUND, {**ROUND, "user": "R"}]
    swift: Any = [{"human": each["user"], "assistant": each["assistant"]} for each in cauldron]
    if as_text:
        cauldron, swift = json.dumps(cauldron), json.dumps(swift)
    found = read_turns({"texts": cauldron, "images": ["a", "b"]}, RecordForm("cauldron"))
    other = read_turns({"conversation": swift, "images": ["a", "b"]}, RecordForm("rounds"))
    assert found == other and found.put_first
    assert [turn.text for turn in found.turns] == ["Q", "A", "R", "A"]
    assert [len(turn.parts) for turn in found.turns] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([], "'texts' is an empty list; expected a list of rounds, {'user': ..., 'assistant'"),
        ("no", "'texts' is text that is no JSON"),
        (["Q"], r"texts\[0\] is a string; expected an object"),
        ([ROUND, {"user": "Q"}], r"texts\[1\].assistant is missing; expected a text"),
        ([{**ROUND, "assistant": ""}], r"texts\[0\].assistant is an empty text"),
        ([{**ROUND, "loss": False}], r"texts\[0\] has the key 'loss', which would be lost"),
        (
            [{"role": "user", "content": "Q"}],
            r"which are turns of 'messages'\. data\.columns: \{messages: texts\} reads them",
        ),
    ],
)
def test_what_is_refused(texts: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_turns({"texts": texts}, RecordForm("cauldron"))


def test_turns_under_another_name_are_read_by_a_mapping() -> None:
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    record = {"conversation": turns}
    form = find_form([record], {"conversations": "conversation"}, "here")
    assert [turn.text for turn in read_turns(record, form).turns] == ["Q", "A"]
