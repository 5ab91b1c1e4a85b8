"""Records that have turns: `messages`, `conversations`, and images without a place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.columns.chat import ChatTurns
from vlmpack.data.columns.form import AS_TURNS, RecordForm, read_turns
from vlmpack.errors import DataError

TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
]


def read(record: dict[str, Any]) -> ChatTurns:
    return read_turns(record, AS_TURNS)


def test_images_of_messages_without_a_place_stand_before_the_first_text_of_the_user() -> None:
    found = read({"messages": TURNS, "images": ["a", "b"]})
    assert found.put_first and found.images == ("a", "b")
    assert [len(turn.parts) for turn in found.turns] == [1, 3, 1]
    swift = read({"messages": TURNS, "images": ["a"], "rejected_response": "B"})
    assert swift.put_first and [len(turn.parts) for turn in swift.turns] == [1, 2]
    as_text = read({"messages": json.dumps(TURNS), "images": '["a", "b"]'})
    assert as_text == found


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([TURNS[0], {"role": "user", "content": "<image>Q"}, TURNS[2]], "1 <image> marker .* 2 im"),
        ([TURNS[0], {"role": "user", "content": [{"type": "text", "text": "Q"}]}], "0 <image> mar"),
        ([TURNS[0], TURNS[2]], "0 <image> markers in the conversation, but 2 images named"),
    ],
)
def test_a_place_is_made_for_all_images_or_none(turns: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read({"messages": turns, "images": ["a", "b"]})


def test_llava_has_a_marker_for_each() -> None:
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    for form in (AS_TURNS, RecordForm("llava", (), True), RecordForm("sharegpt", (), True)):
        with pytest.raises(DataError, match=r"0 <image> markers .* 1 image named"):
            read_turns({"conversations": turns, "image": "a"}, form)


def test_sharegpts_roles_and_tools() -> None:
    call = {"name": "count", "arguments": {"digits": "098"}}
    record = {
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "Three."},
        ],
        "system": "S",
        "tools": json.dumps([{"name": "count", "description": "", "parameters": {}}]),
    }
    found = read_turns(record, RecordForm("sharegpt", (), True))
    roles = [turn.role for turn in found.turns]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert found.turns[2].fields["tool_calls"][0]["function"]["name"] == "count"
    assert len(found.inputs.tools) == 1 and not found.unknown_keys
