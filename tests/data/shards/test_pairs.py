"""Records of pairs: what is read, and what is refused by name."""

from __future__ import annotations

import json
import math

import pytest
from support.pairs import raw_pairs, record_of
from support.shards import TINY_MODEL

from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder
from vlmpack.errors import DataError

QUESTION = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}


def cook(record, fields=("json", "0.png")):
    return cook_text("k", "s.tar", json.dumps(record).encode(), fields)


def test_an_answer_is_a_text_a_turn_or_turns():
    texts = cook({"messages": [QUESTION], "chosen": "A cat.", "rejected": "A dog."})
    turn = cook(
        {
            "messages": [QUESTION],
            "chosen": {"role": "assistant", "content": "A cat."},
            "rejected": [{"role": "assistant", "content": "A dog."}],
        }
    )
    llava = cook(
        {
            "conversations": [{"from": "human", "value": "<image>Which?"}],
            "image": "0.png",
            "chosen": "A cat.",
            "rejected": "A dog.",
        }
    )
    assert texts.sample.answers == turn.sample.answers == llava.sample.answers
    assert [[m.text for m in answer] for answer in texts.sample.answers] == [["A cat."], ["A dog."]]
    assert texts.image_fields == llava.image_fields == ("0.png",)
    assert texts.sample.num_images == 1
    assert texts.unknown_keys == ()
    prompt, answer = texts.sample.conversations[1]
    assert not prompt.learn
    assert answer.text == "A dog."


def test_an_empty_pair_of_columns_is_none():
    messages = [QUESTION, {"role": "assistant", "content": "A cat."}]
    found = cook({"messages": messages, "chosen": None, "rejected": None})
    assert found.sample.answers == ()
    assert found.sample.conversations == (found.sample.messages,)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"chosen": "A cat."}, "has 'chosen', but no 'rejected' answer"),
        ({"chosen": "A cat.", "rejected": None}, "has 'chosen', but no 'rejected' answer"),
        ({"chosen": "A cat.", "rejected": ""}, "has 'chosen', but an empty 'rejected' answer"),
        ({"rejected": "A cat.", "chosen": []}, "has 'rejected', but an empty 'chosen' answer"),
        (
            {"chosen": {"role": "assistant", "content": [{"type": "image"}]}, "rejected": "x"},
            "chosen shows an image inside an answer",
        ),
        (
            {"chosen": "x", "rejected": [{"role": "user", "content": "y"}]},
            "'rejected' is 1 turn of user. Expected an answer alone",
        ),
        (
            {"chosen": "x", "rejected": {"role": "assistant", "content": "y", "loss": False}},
            "excludes all of 'rejected' from the loss",
        ),
        (
            {"chosen": math.nan, "rejected": "x"},
            "chosen is a float; expected a text or a turn of the assistant, or a list of turns",
        ),
        (
            {"chosen": "x", "rejected": ["y", True]},
            r"rejected\[1\] is a bool; expected a text or a turn of the assistant$",
        ),
        ({"chosen": "x", "rejected_response": "y"}, "has .chosen., but no|has .rejected_response."),
        ({"chosen": "x", "rejectd": "y"}, "did you mean 'rejected'"),
    ],
)
def test_bad_pairs_are_refused_by_name(answers, words):
    with pytest.raises(DataError, match=words):
        cook({"messages": [QUESTION], **answers})


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "What?", "chosen": "x", "rejected": "y"},
        {"prompt": [QUESTION], "chosen": [QUESTION], "rejected": [QUESTION]},
        {"chosen": [QUESTION, QUESTION], "rejected": [QUESTION, QUESTION], "images": ["0.png"]},
    ],
)
def test_columns_of_another_trainer_point_to_the_command_that_converts_them(record):
    with pytest.raises(DataError, match=r"TRL writes pairs so.*vlmpack data convert makes such"):
        cook(record)


def test_a_prompt_that_ends_with_an_answer_is_refused():
    messages = [QUESTION, {"role": "assistant", "content": "A cat."}]
    with pytest.raises(DataError, match="the turns end with the assistant's"):
        cook({"messages": messages, "chosen": "x", "rejected": "y"})


def test_an_image_marker_in_an_answer_is_an_image_where_it_marks_one():
    record = {
        "conversations": [{"from": "human", "value": "Which?"}],
        "chosen": "<image>",
        "rejected": "y",
    }
    with pytest.raises(DataError, match="chosen shows an image inside an answer"):
        cook(record, ("json",))


@pytest.mark.parametrize("pairs", [True, False])
def test_the_objective_decides_which_form_is_read(pairs):
    chosen, rejected = raw_pairs()[1]
    record, _ = record_of(chosen, rejected)
    pair = cook(record, ("json",)).sample
    turns = cook({"messages": chosen.messages}, ("json",)).sample
    encoder = Encoder(TINY_MODEL).replace(pairs=pairs)
    good, bad = (pair, turns) if pairs else (turns, pair)
    assert encoder.length(good, []).num_tokens == encoder.encode(good).length
    other = "objective.name: sft" if pairs else "objective.name: dpo"
    for use in (encoder.encode, lambda sample: encoder.length(sample, [])):
        with pytest.raises(DataError, match=other) as caught:
            use(bad)
        assert caught.value.error_class == "schema"
    assert encoder.fingerprint != Encoder(TINY_MODEL).replace(pairs=not pairs).fingerprint


def test_an_answer_without_a_token_to_learn_says_which():
    chosen, rejected = raw_pairs()[1]
    record, _ = record_of(chosen, rejected)
    sample = cook(record | {"rejected": "<|im_end|>"}, ("json",)).sample
    with pytest.raises(DataError, match=r"with the rejected answer: .*special token"):
        Encoder(TINY_MODEL).replace(pairs=True).encode(sample)
