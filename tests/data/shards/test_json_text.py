"""The text of a JSON number, wherever an answer may stand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from vlmpack.data.columns.form import find_form, read_turns
from vlmpack.data.shards.naming import number_text
from vlmpack.data.shards.samples import cook_text
from vlmpack.errors import DataError

ASKED = {"role": "user", "content": "Q"}

ANSWERS: list[dict[str, Any]] = [
    {"messages": [ASKED, {"role": "assistant", "content": 0}]},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": 0}]},
    {"question": "Q", "answer": 0},
    {"question": "Q", "multiple_choice_answer": 0},
    {"question": "Q", "answers": [1, 0, 0]},
    {"question": "Q", "answers": 0},
    {"query": "Q", "response": 0},
    {"query": "B", "response": "b", "history": [["Q", 0]]},
    {"prompt": "Q", "completion": 0},
    {"instruction": "Q", "output": 0},
    {"texts": [{"user": "Q", "assistant": 0}]},
    {"conversation": [{"human": "Q", "assistant": 0}]},
    {"image": "0.png", "caption": 0},
    {"prompt": "Q", "chosen": 0, "rejected": 1},
    {"messages": [ASKED], "branches": [0, "b"]},
]
"""Every place that an answer may have, with the number 0 in it."""


def with_answer(value: Any, answer: object) -> Any:
    """The record with another answer in the place of 0."""
    if isinstance(value, dict):
        return {key: with_answer(item, answer) for key, item in value.items()}
    if isinstance(value, list):
        return [with_answer(item, answer) for item in value]
    return answer if value == 0 else value


def answers_of(record: dict[str, Any]) -> list[str]:
    found = read_turns(record, find_form([record], None, "here"))
    turns = [*found.turns, *(turn for one in (*found.answers, *found.branches) for turn in one)]
    return [turn.text for turn in turns if turn.role == "assistant"]


@pytest.mark.parametrize("record", ANSWERS, ids=lambda record: "+".join(record))
@pytest.mark.parametrize("answer", [0, 12, -7, 2.5, True, False, 10**300])
def test_an_answer_that_is_a_number_is_its_text(record: dict[str, Any], answer: object) -> None:
    text = json.dumps(answer)
    found = answers_of(with_answer(record, answer))
    assert text in found
    assert found == answers_of(with_answer(record, text))


@pytest.mark.parametrize("record", ANSWERS, ids=lambda record: "+".join(record))
@pytest.mark.parametrize("answer", [math.nan, math.inf, {"a": 1}, [[]]], ids=str)
def test_what_is_no_number_of_json_is_refused(record: dict[str, Any], answer: object) -> None:
    with pytest.raises(DataError):
        answers_of(with_answer(record, answer))


@pytest.mark.parametrize("record", ANSWERS[:2], ids=lambda record: "+".join(record))
def test_a_number_that_is_no_answer_is_refused(record: dict[str, Any]) -> None:
    asked = json.loads(json.dumps(record).replace('"Q"', "5"))
    with pytest.raises(DataError, match="an int"):
        answers_of(asked)


def test_shards_are_read_alike() -> None:
    document = json.dumps(ANSWERS[0]).encode()
    assert cook_text("k", "s", document, ["json"]).sample.messages[1].text == "0"


def test_other_values_stay_as_they_are() -> None:
    for value in ("3", None, [3], {"a": 3}, b"3"):
        assert number_text(value) is value
