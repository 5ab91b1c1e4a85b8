"""TRL's prompts and completions, as texts and as turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.columns.form import RecordForm, read_turns
from vlmpack.errors import DataError

FORM = RecordForm("prompt-completion")
ASKED, ANSWERED = {"role": "user", "content": "P"}, {"role": "assistant", "content": "C"}


@pytest.mark.parametrize("prompt", ["P", [ASKED], json.dumps([ASKED])])
@pytest.mark.parametrize("completion", ["C", [ANSWERED], json.dumps([ANSWERED])])
def test_texts_and_turns_are_the_same(prompt: Any, completion: Any) -> None:
    found = read_turns({"prompt": prompt, "completion": completion}, FORM)
    assert [(turn.role, turn.text, turn.learn) for turn in found.turns] == [
        ("user", "P", True),
        ("assistant", "C", True),
    ]


def test_the_loss_is_on_the_completion() -> None:
    kept = {**ANSWERED, "loss": True}
    prompt = [{"role": "system", "content": "S"}, ASKED, ANSWERED, ASKED, kept, ASKED]
    found = read_turns({"prompt": prompt, "completion": [ANSWERED, ASKED, ANSWERED]}, FORM)
    learnt = [turn.learn for turn in found.turns if turn.role == "assistant"]
    assert learnt == [False, True, True, True]
    assert "loss" not in ANSWERED, "the record was changed"


def test_images_beside_texts_stand_first() -> None:
    found = read_turns({"prompt": "P", "completion": "C", "image": "0.png"}, FORM)
    assert found.put_first and [len(turn.parts) for turn in found.turns] == [2, 1]
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "P"}]}]
    same = read_turns({"prompt": shown, "completion": "C", "images": ["0.png"]}, FORM)
    assert same.turns == found.turns and not same.put_first


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"prompt": "P"}, "no 'completion', as prompt-completion has it"),
        ({"prompt": "P", "completion": []}, "'completion' is an empty list; expected a text"),
        ({"prompt": {"role": "user"}, "completion": "C"}, "'prompt' is an object"),
        ({"prompt": '[{"role": "user"', "completion": "C"}, "'prompt' is text that is no JSON of"),
        ({"prompt": [3], "completion": "C"}, r"messages\[0\] is an int"),
        ({"prompt": "P", "completion": "C", "label": True}, "has 'label', a yes or no"),
        ({"prompt": "P", "completion": "C", "completion_mask": [1]}, "has 'completion_mask'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_turns(given, FORM)
