"""Images with a caption and no question."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpack.data.columns.form import RecordForm, find_form, read_turns
from vlmpack.encode.sample import ImagePart, TextPart
from vlmpack.errors import DataError

FORM = RecordForm("caption")


@pytest.mark.parametrize("key", ["caption", "text"])
@pytest.mark.parametrize("images", [{"image": "a"}, {"images": ["a"]}, {"images": '["a"]'}])
def test_the_user_shows_the_image_alone(key: str, images: dict[str, Any]) -> None:
    record = {key: "a literal <image>", **images}
    assert find_form([record], None, "here") == FORM
    found = read_turns(record, FORM)
    assert [turn.parts for turn in found.turns] == [
        (ImagePart(0),),
        (TextPart("a literal <image>"),),
    ]
    assert found.images == ("a",) and not found.put_first and not found.unknown_keys


def test_several_images_of_one_caption() -> None:
    found = read_turns({"images": ["a", "b"], "text": "T"}, FORM)
    assert len(found.turns[0].parts) == 2 and found.images == ("a", "b")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"image": "a", "text": "T", "caption": "C"}, "'caption' and 'text', and they differ"),
        ({"image": "a", "text": ""}, "no 'caption', as caption has it"),
        ({"image": "a", "caption": ["C", "D"]}, "'caption' is a list; expected a text"),
        ({"images": [], "caption": "C"}, "a caption and no image"),
    ],
)
def test_what_is_refused(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_turns(record, FORM)


def test_one_of_two_captions_by_name() -> None:
    record = {"image": "a", "text": "T", "caption": "C"}
    form = find_form([record], {"text": "caption"}, "here")
    found = read_turns(record, form)
    assert found.turns[1].text == "C" and found.unknown_keys == ("text",)
