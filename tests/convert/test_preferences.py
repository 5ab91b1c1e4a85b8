"""Pairs in the words of TRL, ms-swift and LLaMA-Factory become the same record."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmpack.convert.chat import chat_turns
from vlmpack.convert.records import open_records
from vlmpack.errors import DataError

ASKED = {"role": "user", "content": "Which?"}
CAT, DOG = ({"role": "assistant", "content": text} for text in ("A cat.", "A dog."))

FORMS = {
    "ours": {"messages": [ASKED], "chosen": "A cat.", "rejected": "A dog."},
    "TRL, turns": {"prompt": [ASKED], "chosen": [CAT], "rejected": [DOG]},
    "TRL, texts": {"prompt": "Which?", "chosen": "A cat.", "rejected": "A dog."},
    "TRL, no prompt": {"chosen": [ASKED, CAT], "rejected": [ASKED, DOG]},
    "ms-swift": {"messages": [ASKED, CAT], "rejected_response": "A dog."},
    "ms-swift, turns": {"messages": [ASKED, CAT], "rejected_messages": [ASKED, DOG]},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "Which?"}],
        "chosen": {"from": "gpt", "value": "A cat."},
        "rejected": {"from": "gpt", "value": "A dog."},
    },
}
WANTED = {"messages": [ASKED], "chosen": [CAT], "rejected": [DOG]}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(form):
    assert chat_turns(FORMS[form]).document(()) == WANTED


def test_images_stand_in_the_prompt():
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}
    record = {"prompt": [asked], "images": ["a.png"], "chosen": [CAT], "rejected": [DOG]}
    found = chat_turns(record)
    assert found.images == ("a.png",)
    assert found.document(("0.png",))["messages"][0]["content"][0] == {
        "type": "image",
        "image": "0.png",
    }


def test_tables_with_a_prompt_of_their_own_are_read(tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([FORMS["TRL, turns"], FORMS["TRL, turns"]]), path)
    records = list(open_records(path))
    assert [chat_turns(record.value).document(()) for record in records] == [WANTED] * 2
    pq.write_table(pa.Table.from_pylist([FORMS["TRL, no prompt"]]), path)
    [record] = open_records(path)
    assert chat_turns(record.value).document(()) == WANTED


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"chosen": "A cat.", "rejected": "A dog."}, "no 'prompt' and no turns before them"),
        ({"chosen": [CAT], "rejected": [DOG]}, "do not begin with the same turns"),
        ({"messages": [ASKED], "rejected_response": "x"}, "its turns end with 'user'"),
        ({"rejected_response": "x", "prompt": "y"}, "no list of turns that it belongs to"),
        (
            {"messages": [ASKED, CAT], "rejected_response": "x", "rejected": "y"},
            "says its answers twice: 'rejected_response', 'rejected'",
        ),
        (
            {"messages": [ASKED, CAT], "rejected_messages": [CAT, DOG]},
            "does not begin with the turns",
        ),
        ({"messages": [ASKED, CAT], "rejected_images": ["a.png"]}, "about the same images here"),
    ],
)
def test_what_is_no_pair_is_refused_by_name(record, words):
    with pytest.raises(DataError, match=words):
        chat_turns(record)
