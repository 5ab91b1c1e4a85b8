"""Instructions, their inputs, outputs, histories and pairs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.columns.form import RecordForm, read_turns
from vlmpack.errors import DataError

FORM = RecordForm("alpaca")
BASE = {"instruction": "I", "output": "O"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ["I", "O"]),
        ({"input": ""}, ["I", "O"]),
        ({"input": None, "history": None}, ["I", "O"]),
        ({"input": "N"}, ["I\nN", "O"]),
        ({"history": [["a", "b"], ["c", "d"]]}, ["a", "b", "c", "d", "I", "O"]),
        ({"history": json.dumps([["a", "b"]])}, ["a", "b", "I", "O"]),
        ({"history": [], "system": "S"}, ["S", "I", "O"]),
    ],
)
def test_the_turns(given: dict[str, Any], wanted: list[str]) -> None:
    found = read_turns(BASE | given, FORM)
    assert [turn.text for turn in found.turns] == wanted
    assert all(turn.learn for turn in found.turns), "a history is learnt"
    assert not found.unknown_keys


def test_tools_stand_beside_an_instruction() -> None:
    tool = {"name": "count", "description": "counts", "parameters": {"type": "object"}}
    found = read_turns(BASE | {"tools": json.dumps([tool])}, FORM)
    assert [each["function"]["name"] for each in found.inputs.tools] == ["count"]


def test_the_first_image_goes_into_the_first_turn_of_a_history() -> None:
    record = BASE | {"history": [["a", "b"]], "images": ["0.png"]}
    found = read_turns(record, FORM)
    assert found.put_first and [len(turn.parts) for turn in found.turns] == [2, 1, 1, 1]


def test_a_pair_of_outputs() -> None:
    record = {"instruction": "I", "input": "N", "chosen": "C", "rejected": "R"}
    found = read_turns(record, FORM)
    assert [turn.text for turn in found.turns] == ["I\nN"]
    assert [turns[0].text for turns in found.answers] == ["C", "R"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"output": ""}, "an empty 'output', as alpaca has it"),
        ({"instruction": ["I"]}, "'instruction' is a list"),
        ({"input": 3}, "'input' is an int"),
        ({"history": "a"}, "'history' is text that is no JSON"),
        ({"history": {"a": "b"}}, "'history' is an object"),
        ({"history": [["a", "b", "c"]]}, r"history\[0\] is no pair of texts"),
        ({"history": [["a", "b"], ["a", None]]}, r"history\[1\] is no pair"),
        ({"chosen": "C"}, "has 'chosen', but no 'rejected'"),
        ({"chosen": "C", "rejected": "R"}, "has its answer twice"),
        ({"kto_tag": True}, "has 'kto_tag'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_turns(BASE | given, FORM)
