"""Samples of shards in other layouts become the sample that the same turns are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.columns.form import AS_TURNS, RecordForm, find_form
from vlmpack.data.files.shard_samples import member_document, member_record
from vlmpack.data.shards.samples import CookedText, cook_text
from vlmpack.errors import DataError

CAPTION = RecordForm("caption")


def cooked(document: bytes, fields: list[str]) -> CookedText:
    return cook_text("k", "s.tar", document, fields)


def by_hand(parts: list[Any], answer: str, images: list[str]) -> CookedText:
    """The same sample as a shard of ours has it."""
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return cooked(json.dumps({"messages": turns}).encode(), images)


def read(document: Any, text: bytes | None, fields: list[str], form: RecordForm) -> CookedText:
    data = None if document is None else json.dumps(document).encode()
    return cooked(member_document(data, text, fields, form).data, fields)


def test_an_image_and_a_text_are_a_caption() -> None:
    fields = ["jpg", "txt"]
    record = member_record(None, "\ufeffEine Sieben.\n".encode(), fields)
    assert record == {"images": ["jpg"], "text": "Eine Sieben."}
    assert find_form([record], None, "here") == CAPTION
    found = read(None, b"Eine Sieben.\n", fields, CAPTION)
    assert found == by_hand([{"type": "image"}], "Eine Sieben.", ["jpg"])


def test_images_of_a_sample_are_shown_in_the_order_of_their_numbers() -> None:
    fields = ["0.jpg", "1.jpg", "10.jpg", "2.jpg", "txt"]
    found = read(None, b"Four.", fields, CAPTION)
    assert found.image_fields == ("0.jpg", "1.jpg", "2.jpg", "10.jpg")


def test_the_json_of_another_layout() -> None:
    record = {"question": "Which?", "answer": "7", "source": "web", "task": "digit", "id": "a"}
    data = json.dumps(record).encode()
    form = find_form([member_record(data, None, ["jpg", "json"])], None, "here")
    assert form == RecordForm("vqa")
    made = member_document(data, b"not looked at", ["jpg", "json", "txt"], form)
    assert made.unused == ("source",) and made.put_first
    found = cooked(made.data, ["jpg", "json"])
    wanted = by_hand([{"type": "image"}, {"type": "text", "text": "Which?"}], "7", ["jpg"])
    assert found.sample.messages == wanted.sample.messages and found.image_fields == ("jpg",)
    assert found.sample.task == "digit" and not found.unknown_keys
    named = read({**record, "image": "k.jpg"}, None, ["0.png", "jpg", "json"][1:], form)
    assert named.image_fields == ("jpg",)


def test_a_json_of_no_layout_leaves_the_text_to_be_the_caption() -> None:
    """As img2dataset writes samples: the JSON says where the image is from."""
    about = {"url": "http://x/y.jpg", "width": 3, "status": "success"}
    made = member_document(json.dumps(about).encode(), b"A cat.", ["jpg", "json", "txt"], CAPTION)
    assert {*made.unused} == {*about}
    assert cooked(made.data, ["jpg", "json"]).sample.messages[1].text == "A cat."
    both = {**about, "caption": "A dog."}
    found = read(both, b"A cat.", ["jpg", "json", "txt"], CAPTION)
    assert found.sample.messages[1].text == "A dog."


def test_turns_stay_byte_for_byte() -> None:
    data = b' {"messages": [], "odd": 1}'
    assert member_document(data, b"x", ["json", "txt"], AS_TURNS).data is data


def test_texts_that_json_writes_out_are_read_back() -> None:
    found = read(None, 'ä " \\ \U0001f600'.encode(), ["jpg", "txt"], CAPTION)
    assert found.sample.messages[1].text == 'ä " \\ \U0001f600'


@pytest.mark.parametrize(
    ("document", "text", "form", "reason"),
    [
        (None, None, CAPTION, "no '.json' and no '.txt' member; found '.jpg'"),
        (None, b"\xff\xfe", CAPTION, "the '.txt' member is no UTF-8"),
        (None, b"  \n", CAPTION, "an empty 'caption'|no 'caption'"),
        (b"[1]", None, RecordForm("vqa"), "the '.json' member is a list"),
        (b"{", None, RecordForm("vqa"), "cannot be parsed"),
        (
            json.dumps({"question": "Q", "answer": "A", "image": "data:image/png;base64,AAAA"}),
            None,
            RecordForm("vqa"),
            "expected the images of a shard as members",
        ),
    ],
)
def test_what_is_refused(document: Any, text: Any, form: RecordForm, reason: str) -> None:
    data = document.encode() if isinstance(document, str) else document
    with pytest.raises(DataError, match=reason) as caught:
        member_document(data, text, ["jpg"], form)
    assert caught.value.error_class == "schema"
