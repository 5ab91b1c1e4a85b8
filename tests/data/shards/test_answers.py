"""Each answer of a record as a sample of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.shards.samples import CookedText, cook_text, cook_texts
from vlmpack.errors import DataError


def user(text: str, images: int = 0) -> dict[str, Any]:
    parts = [{"type": "image"} for _ in range(images)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def answer(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def cooked(turns: list[dict[str, Any]], images: int = 0, **keys: Any) -> tuple[CookedText, ...]:
    document = json.dumps({"messages": turns, **keys}).encode()
    fields = ("json", *(f"{n}.png" for n in range(images)))
    return cook_texts("k", "s.tar", document, fields, each_answer=True)


def said(text: CookedText) -> list[tuple[str, bool]]:
    return [(turn.text, turn.learn) for turn in text.sample.messages if turn.role != "user"]


TURNS = [user("a", 1), answer("A"), user("b"), answer("B"), user("c", 2), answer("C"), user("d")]


def test_a_sample_ends_with_its_answer_which_alone_is_learnt() -> None:
    texts = cooked(TURNS, 3)
    assert [text.sample.key for text in texts] == ["k#0", "k#1", "k#2"]
    assert [said(text) for text in texts] == [
        [("A", True)],
        [("A", False), ("B", True)],
        [("A", False), ("B", False), ("C", True)],
    ]
    assert [text.image_fields for text in texts] == [("0.png",)] * 2 + [("0.png", "1.png", "2.png")]
    assert [text.sample.num_images for text in texts] == [1, 1, 3]
    assert [text.sample.num_common for text in texts] == [0, 1, 3]
    assert [text.sample.is_continued for text in texts] == [True, True, False]


def test_a_record_of_one_answer_is_the_sample_that_it_was() -> None:
    turns = [user("a", 1), answer("A")]
    document = json.dumps({"messages": turns, "source": "x"}).encode()
    fields = ("json", "0.png")
    assert cook_texts("k", "s", document, fields, each_answer=True) == cook_texts(
        "k", "s", document, fields
    )


def test_an_answer_that_the_data_exclude_is_context() -> None:
    turns = [user("a"), answer("A", loss=False), user("b"), answer("B"), answer("C")]
    texts = cooked(turns)
    assert [said(text) for text in texts] == [
        [("A", False), ("B", True)],
        [("A", False), ("B", False), ("C", True)],
    ]


def test_a_call_is_an_answer() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        user("a"),
        answer("", tool_calls=[call]),
        {"role": "tool", "content": "4"},
        answer("four"),
    ]
    texts = cooked(turns)
    assert [len(text.sample.messages) for text in texts] == [2, 4]
    assert texts[1].sample.messages[1].fields and not texts[1].sample.messages[1].learn


def test_the_answers_of_branches_are_counted_through() -> None:
    branches = [[user("b"), answer("B"), user("c"), answer("C")], [user("d"), answer("D")]]
    texts = cooked([user("a", 1), answer("A")], 1, branches=branches)
    assert [(text.sample.key, said(text)) for text in texts] == [
        ("k#0", [("A", False), ("B", True)]),
        ("k#1", [("A", False), ("B", False), ("C", True)]),
        ("k#2", [("A", False), ("D", True)]),
    ]
    assert [text.sample.num_common for text in texts] == [2, 3, 2]
    alone = cooked([user("a", 1), answer("A")], 1, branches=branches[1:])
    assert [text.sample.key for text in alone] == ["k#0"], "as without"


def test_a_pair_stays_one_sample() -> None:
    [text] = cooked([user("a"), answer("A"), user("b")], chosen="x", rejected="y")
    assert text.sample.key == "k" and len(text.sample.answers) == 2


def test_a_number_that_the_record_has_not_is_named() -> None:
    document = json.dumps({"messages": TURNS[:4]}).encode()
    fields = ("json", "0.png")
    text = cook_text("k", "s", document, fields, 1, each_answer=True)
    assert text.sample.key == "k#1"
    with pytest.raises(DataError, match="number 2 was indexed"):
        cook_text("k", "s", document, fields, 2, each_answer=True)
