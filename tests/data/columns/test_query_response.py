"""ms-swift's queries, responses and histories."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpack.data.columns.form import RecordForm, read_turns
from vlmpack.errors import DataError

FORM = RecordForm("query-response")
BASE = {"query": "Q", "response": "R"}


def test_rounds_before_come_first_and_the_system_before_them() -> None:
    record = BASE | {"history": [["a", "b"]], "system": "S", "images": ["0.png"]}
    found = read_turns(record, FORM)
    assert [turn.text for turn in found.turns] == ["S", "a", "b", "Q", "R"]
    assert [turn.role for turn in found.turns[:2]] == ["system", "user"]
    assert found.put_first and len(found.turns[1].parts) == 2, "ms-swift puts images there, too"


@pytest.mark.parametrize("beside", [{"rejected_response": "X"}, {"rejected_response": None}])
def test_a_rejected_response_makes_a_pair(beside: dict[str, Any]) -> None:
    found = read_turns(BASE | beside, FORM)
    pair = [turns[0].text for turns in found.answers]
    assert pair == (["R", "X"] if beside["rejected_response"] else [])
    assert [turn.text for turn in found.turns] == (["Q"] if pair else ["Q", "R"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"query": None}, "the record has no 'query', as query-response has it"),
        ({"response": ["R", "S"]}, "'response' is a list; expected a text"),
        ({"query": "<image><image>", "images": ["a"]}, "2 <image> markers .* 1 image named"),
        ({"query": "<image>Q"}, None),
        ({"objects": {"bbox": [[1, 2]]}}, "no turn has a place for box 0"),
        ({"videos": ["a.mp4"]}, "has 'videos'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], reason: str | None) -> None:
    if reason is None:  # a literal: the record names no image
        assert read_turns(BASE | given, FORM).turns[0].text == "<image>Q"
        return
    with pytest.raises(DataError, match=reason):
        read_turns(BASE | given, FORM)
