"""Calls and results in other trainers' spellings give the same turns as ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.columns.chat import chat_turns, respelt
from vlmpack.data.shards.samples import cook_text
from vlmpack.errors import DataError

CALLS = [{"name": "get", "arguments": {"city": "Oslo"}}, {"name": "ask", "arguments": {}}]
OURS = {
    "messages": [
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call} for call in CALLS],
        },
        {"role": "tool", "content": "4 <b>"},
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "A"},
    ]
}


def sharegpt() -> dict[str, Any]:
    turns = [
        ("human", "Q"),
        ("function_call", json.dumps(CALLS)),
        ("observation", "4 <b>"),
        ("observation", "{}"),
        ("gpt", "A"),
    ]
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def swift() -> dict[str, Any]:
    turns = [
        ("user", "Q"),
        *(("tool_call", json.dumps(call)) for call in CALLS),
        ("tool_response", "4 <b>"),
        ("tool_response", "{}"),
        ("assistant", "A"),
    ]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.mark.parametrize("record", [sharegpt(), swift()], ids=["sharegpt", "ms-swift"])
def test_they_are_the_same_turns(record: dict[str, Any]) -> None:
    expected = cook_text("k", "s", json.dumps(OURS).encode(), ("json",)).sample.messages
    assert chat_turns(record).turns == chat_turns(OURS).turns == expected
    written = chat_turns(record).document(())
    assert cook_text("k", "s", json.dumps(written).encode(), ("json",)).sample.messages == expected
    with pytest.raises(DataError, match="expected one of"):  # in shards the roles are ours
        cook_text("k", "s", json.dumps(record).encode(), ("json",))


def test_flags_stay_with_their_calls() -> None:
    record = swift()
    record["messages"][1]["loss"] = False
    first, second = chat_turns(record).turns[1:3]
    assert (first.learn, second.learn) == (False, True)
    assert [len(turn.fields["tool_calls"]) for turn in (first, second)] == [1, 1]


FUNCTION = {"name": "get", "description": "Gets.", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("tool", [FUNCTION, {"type": "function", **FUNCTION}, WRAPPED])
def test_tools_are_those_that_a_server_hands_to_the_template(tool: Any, as_text: bool) -> None:
    tools = json.dumps([tool]) if as_text else [tool]
    converted = chat_turns({**sharegpt(), "tools": tools})
    assert list(converted.inputs.tools) == [WRAPPED] == converted.document(())["tools"]
    other = {"type": "web_search", "name": "get"}  # of another kind: as it is
    assert list(chat_turns({**sharegpt(), "tools": [other]}).inputs.tools) == [other]
    in_shards = json.dumps({**OURS, "tools": [FUNCTION]}).encode()  # as transformers would take it
    assert list(cook_text("k", "s", in_shards, ("json",)).sample.inputs.tools) == [FUNCTION]


@pytest.mark.parametrize("tools", ["[{", '"get"', {"a": 1}, [1], [[]]])
def test_tools_that_are_none_are_named_by_the_reader(tools: object) -> None:
    with pytest.raises(DataError, match="tools"):
        chat_turns({**sharegpt(), "tools": tools})


def test_other_turns_stay_as_they_are() -> None:
    turns: list[Any] = [{"role": "user", "content": "Q"}, "no turn", {"content": 1}, None]
    assert respelt(turns, "messages") == turns


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("get(Oslo)", r"messages\[1\] is a call that is no JSON"),
        ('"get"', "a call without a name"),
        ('{"arguments": {}}', "a call without a name"),
        (None, "a call without a name"),
        ('{"name": "f", "args": {"a": 1}}', "the key 'args'.*'arguments'"),
    ],
)
def test_calls_that_are_none_are_refused(value: object, reason: str) -> None:
    record = swift()
    record["messages"][1]["content"] = value
    with pytest.raises(DataError, match=reason):
        chat_turns(record)
