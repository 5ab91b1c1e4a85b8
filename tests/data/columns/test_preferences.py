"""Pairs in the words of TRL, ms-swift and LLaMA-Factory become the same record."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlmpack.cli.app import app
from vlmpack.data.columns.chat import chat_turns
from vlmpack.data.files.records import open_records
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


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Which?", "chosen": "A cat.", "rejected": "A dog."},
        {"prompt": [ASKED], "chosen": [CAT], "rejected": [DOG]},
        {"chosen": [ASKED, CAT], "rejected": [ASKED, DOG]},
    ],
)
def test_images_beside_texts_stand_where_trl_puts_them(record):
    found = chat_turns({**record, "images": ["b.png", "a.png"]})
    assert found.put_first
    assert found.images == ("b.png", "a.png")
    shown = [{"type": "image", "image": name} for name in ("0.png", "1.png")]
    assert found.document(("0.png", "1.png")) == {
        **WANTED,
        "messages": [{**ASKED, "content": [*shown, {"type": "text", "text": "Which?"}]}],
    }


def test_images_go_into_the_first_turn_of_the_user():
    system, later = ({"role": role, "content": "x"} for role in ("system", "user"))
    turns = [system, ASKED, CAT, later]
    found = chat_turns({"prompt": turns, "images": ["a.png"], "chosen": [CAT], "rejected": [DOG]})
    assert [turn.text.count("Which?") for turn in found.turns] == [0, 1, 0, 0]
    assert [len(turn.parts) for turn in found.turns] == [1, 2, 1, 1]


def test_a_place_that_a_record_names_is_kept():
    marked = {"prompt": "Which <image>?", "images": ["a.png"], "chosen": "x", "rejected": "y"}
    found = chat_turns(marked)
    assert not found.put_first
    assert [type(part).__name__ for part in found.turns[0].parts] == [
        *("TextPart", "ImagePart", "TextPart"),
    ]
    assert not chat_turns(FORMS["TRL, texts"]).put_first
    with pytest.raises(DataError, match="1 <image> marker in the conversation, but 2 images named"):
        chat_turns({**marked, "images": ["a.png", "b.png"]})


def test_the_command_says_where_images_were_put(tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    record = {**FORMS["TRL, texts"], "images": ["a.png"]}
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, [record, FORMS["TRL, texts"]])))
    command = ["data", "convert", str(source), str(tmp_path / "out"), "--index-dir", str(tmp_path)]
    app(command, standalone_mode=False)
    said = capsys.readouterr().err
    assert "1 record with images and no place for them: they stand before the first text" in said
    manifest = json.loads((tmp_path / "out-manifest.json").read_text())
    assert manifest["put_first"] == 1


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
        ({"prompt": "x", "chosen": "y", "rejected": ""}, "'chosen', but an empty 'rejected' answ"),
        ({"prompt": "x", "rejected": "y"}, "has 'rejected', but no 'chosen' answer; expected both"),
        *(
            (
                {"prompt": [turn], "images": ["a.png"], "chosen": "y", "rejected": "z"},
                r"names 1 image, and no turn of its prompt shows one. Expected an image part .* or "
                r"<image> at the place of each. If the turns are texts alone",
            )
            for turn in (
                {"role": "system", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            )
        ),
    ],
)
def test_what_is_no_pair_is_refused_by_name(record, words):
    with pytest.raises(DataError, match=words):
        chat_turns(record)
