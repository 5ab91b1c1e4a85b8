"""A record that holds several samples: what each says, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.shards.samples import CookedText, cook_text, cook_texts
from vlmpack.data.shards.turns import branch_key, record_key
from vlmpack.encode.sample import ImagePart, Message, TextPart
from vlmpack.errors import DataError

PICTURE: dict[str, Any] = {"role": "user", "content": [{"type": "image"}]}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def cooked(record: dict[str, Any], fields: tuple[str, ...] = ("json", "0.png")) -> list[CookedText]:
    return list(cook_texts("a/k", "s.tar", json.dumps(record).encode(), fields))


def alone(*turns: dict[str, Any], fields: tuple[str, ...] = ("json", "0.png")) -> Any:
    """The turns of a record that is one sample."""
    [text] = cooked({"messages": list(turns)}, fields)
    return text.sample.messages


def test_questions_about_one_image_stand_in_its_turn() -> None:
    record = {
        "messages": [PICTURE],
        "branches": [[asked("What?"), answered("A cat.")], [asked("Where?"), answered("Here.")]],
    }
    texts = cooked(record)
    assert [text.sample.key for text in texts] == ["a/k#0", "a/k#1"]
    assert [text.image_fields for text in texts] == [("0.png",)] * 2
    for text, question, answer in zip(texts, ("What?", "Where?"), ("A cat.", "Here."), strict=True):
        shown = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        turns = alone(shown, answered(answer))
        assert [m.parts for m in text.sample.messages] == [m.parts for m in turns]
        assert text.sample.num_common == 0, "the image's turn is not whole without the question"


def test_texts_that_meet_become_one() -> None:
    record = {
        "conversations": [{"from": "human", "value": "<image>\n"}],
        "branches": [[{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A cat."}]],
    }
    [text] = cooked(record)
    assert text.sample.messages[0].parts == (ImagePart(0), TextPart("\nWhat?"))


def test_answers_to_one_prompt_follow_turns_that_are_not_learnt() -> None:
    before = [asked("Hello."), answered("Hi."), asked("Two?")]
    record = {"messages": before, "branches": ["Two.", [answered("2")]], "task": "t"}
    texts = cooked(record, ("json",))
    for text, answer in zip(texts, ("Two.", "2"), strict=True):
        sample = text.sample
        assert [m.parts for m in sample.messages] == [
            m.parts for m in alone(*before, answered(answer), fields=("json",))
        ]
        assert [m.learn for m in sample.messages if m.role == "assistant"] == [False, True]
        assert sample.num_common == 3 and sample.task == "t" and not sample.answers


def test_a_dialogue_may_go_on_in_several_ways() -> None:
    record = {
        "messages": [PICTURE, answered("A cat.")],
        "branches": [
            [asked("Sure?"), answered("Yes.", loss=False), asked("Why?"), answered("Ears.")],
            [asked("Big?"), answered("No.")],
        ],
    }
    one, other = (text.sample for text in cooked(record))
    assert (one.num_common, other.num_common) == (2, 2)
    learnt = [[m.learn for m in s.messages if m.role == "assistant"] for s in (one, other)]
    assert learnt == [[False, False, True], [False, True]]
    assert one.messages[:2] == other.messages[:2]


def test_a_branch_is_asked_for_by_its_number() -> None:
    document = json.dumps({"messages": [asked("?")], "branches": ["a", "b"]}).encode()
    assert cook_text("k", "s", document, ("json",), 1).sample.messages[-1].text == "b"
    with pytest.raises(DataError, match="holds 2 samples"):
        cook_text("k", "s", document, ("json",))
    with pytest.raises(DataError, match="holds 2 branches; number 2 was indexed"):
        cook_text("k", "s", document, ("json",), 2)
    single = json.dumps({"messages": [asked("?"), answered("a")], "branches": None}).encode()
    assert cook_text("k", "s", single, ("json",)).sample.num_common == 0
    with pytest.raises(DataError, match="holds 0 branches; number 0 was indexed"):
        cook_text("k", "s", single, ("json",), 0)


def test_keys_lead_back_to_their_record() -> None:
    assert branch_key("a#1", 3) == "a#1#3" and record_key("a#1#3", 3) == "a#1"
    assert branch_key("a#1", None) == record_key("a#1", None) == "a#1"


def test_unknown_keys_are_those_of_one_record() -> None:
    record = {"messages": [asked("?")], "branches": ["a", "b"], "score": 1}
    assert [text.unknown_keys for text in cooked(record, ("json",))] == [("score",), ()]


QA = [asked("What?"), answered("A cat.")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"branches": [QA, []]}, r"branches\[1\] is empty"),
        ({"branches": [""]}, r"branches\[0\] is empty"),
        ({"branches": {"a": 1}}, "'branches' is an object; expected a list"),
        ({"branches": [{"a": 7}]}, r"branches\[0\] is an object; expected a list of turns"),
        ({"branches": [["x"]]}, r"branches\[0\]\[0\] is .*; expected an object"),
        ({"branches": [QA], "chosen": "a", "rejected": "b"}, "'branches' and 'chosen'"),
        ({"branches": [QA, [PICTURE, answered("x")]]}, r"branches\[1\]\[0\] shows an image inside"),
        ({"branches": [[asked("?")]]}, r"branches\[0\] has no turn of the assistant that is learn"),
        (
            {"branches": [[answered("x", loss=False)]]},
            "has no turn of the assistant that is learnt",
        ),
        ({"branches": [[{"role": "system", "content": "x"}, *QA]]}, "no turn of the system's"),
        ({"branches": [QA, ["more"]]}, r"branches\[1\]\[0\] is"),
        (
            {"messages": [PICTURE, answered("x")], "branches": ["more"]},
            "turns of assistant, and the turns before end with the assistant's. Expected it to "
            "begin with the user's or the tool's",
        ),
        ({"messages": [], "branches": [QA]}, "expected a list of turns"),
        ({"messages": [answered("x")], "branches": [QA]}, "starts with the assistant"),
        ({"branchs": [QA]}, "did you mean 'branches'"),
        ({"branches": []}, "none of the 1 turns is the assistant's"),
    ],
)
def test_bad_records_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        cooked({"messages": [PICTURE], **changes})
    assert error.value.error_class == "schema"


def test_messages_of_a_branch_are_messages() -> None:
    [text] = cooked({"messages": [PICTURE], "branches": [QA]})
    assert all(isinstance(message, Message) for message in text.sample.messages)
    assert text.num_text_bytes == len("What?A cat.")
