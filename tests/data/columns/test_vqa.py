"""Questions with one answer or many."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpack.data.columns.form import RecordForm, read_turns
from vlmpack.errors import DataError

FORM = RecordForm("vqa")


@pytest.mark.parametrize(
    ("given", "answer", "unread"),
    [
        ({"answer": "a"}, "a", ()),
        ({"answers": ["b"]}, "b", ()),
        ({"answers": "b"}, "b", ()),
        ({"answers": ["a", "b", "b", "a"]}, "a", ()),
        ({"answers": ["a", "b", "b"]}, "b", ()),
        ({"answers": [{"answer": "b", "answer_id": n} for n in range(3)]}, "b", ()),
        ({"answer": "a", "answers": ["b", "b"]}, "a", ("answers",)),
        ({"answer": None, "multiple_choice_answer": "c", "answers": ["b"]}, "c", ("answers",)),
        ({"answer": "a", "multiple_choice_answer": "c"}, "a", ("multiple_choice_answer",)),
        ({"answer": "a", "answers": [], "question_id": 7}, "a", ("question_id",)),
        ({"answers": [3, 4, 4]}, "4", ()),
    ],
)
def test_what_is_learnt(given: dict[str, Any], answer: str, unread: tuple[str, ...]) -> None:
    found = read_turns({"question": "Q", **given}, FORM)
    assert [turn.text for turn in found.turns] == ["Q", answer]
    assert found.unknown_keys == unread


def test_a_marked_place_is_kept() -> None:
    record = {"question": "Is <image> left?", "answer": "a", "image": "0.png"}
    found = read_turns(record, FORM)
    assert not found.put_first and [len(turn.parts) for turn in found.turns] == [3, 1]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"question": "Q", "answer": [3]}, "'answer' is a list; expected a text"),
        ({"question": "Q", "answer": ""}, "an empty 'answer', as vqa has it"),
        ({"question": ["Q"], "answer": "a"}, "'question' is a list"),
        ({"answer": "a"}, "no 'question', as vqa has it; found 'answer'"),
        ({"question": "Q", "answers": [["a"]]}, "'answers' is a list without texts alone"),
        ({"question": "Q", "answers": {"text": ["a"]}}, "'answers' is an object without texts"),
        ({"question": "Q", "answers": ["a", None]}, "without texts alone"),
        ({"question": "Q", "answer": "a", "choices": ["a", "b"]}, "'choices' beside its question"),
        ({"question": "Q", "answer": "a", "context": "C"}, "'context' beside its question"),
        ({"question": "<image>?", "answer": "a", "images": ["a", "b"]}, "1 <image> marker"),
    ],
)
def test_what_is_refused(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        read_turns(record, FORM)
    assert caught.value.error_class == "schema"
