"""Images under other names: which are read, in which records, and what looks like one."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from support.shard_fakes import image_bytes
from support.shards import ROOT

from vlmpack.data.columns.form import RecordForm, find_form, read_columns, read_turns
from vlmpack.data.columns.image_columns import (
    FILE_COLUMNS,
    IMAGE_COLUMNS,
    file_names,
    identifies_an_image,
    looks_like_images,
    with_images,
)
from vlmpack.data.shards.naming import misspelt

ASKED = {"question": "Q", "answer": "A"}
TURNS = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
PNG = image_bytes(40, 40, seed=1)


def images_of(record: dict[str, Any], **columns: str) -> tuple[Any, ...]:
    return read_turns(record, find_form([record], columns or None, "here")).images


def test_the_page_lists_the_names_that_are_read() -> None:
    page = (ROOT / "docs/layouts.md").read_text()
    section = page.partition("## Images by other names")[2].partition("\n## ")[0]
    always, sometimes = re.findall(r"^\| (`.*`) \|", section, re.MULTILINE)
    assert re.findall(r"`([^`]+)`", always) == list(IMAGE_COLUMNS)
    assert re.findall(r"`([^`]+)`", sometimes) == list(FILE_COLUMNS)


@pytest.mark.parametrize("name", [*IMAGE_COLUMNS, *FILE_COLUMNS])
def test_a_column_of_such_a_name_is_read_in_every_layout(name: str) -> None:
    assert misspelt(name) is None
    for record in (ASKED, TURNS, {"prompt": "Q", "completion": "A"}, {"text": "A"}):
        for value in ("0.png", ["0.png"], {"bytes": None, "path": "0.png"}):
            assert images_of(record | {name: value}) == ("0.png",)
        assert images_of(record | {name: "0.png", "image": None}) == ("0.png",)
    assert images_of(ASKED | {name: PNG}) == (PNG,)
    form = find_form([ASKED | {name: "0.png"}], None, "here")
    assert name in read_columns(form, ["question", "answer", name])


@pytest.mark.parametrize("name", ["imagePath", "Image Path", "image-path", "IMAGE_PATH"])
def test_a_name_may_be_written_in_another_way(name: str) -> None:
    assert images_of(ASKED | {name: "0.png"}) == ("0.png",)


@pytest.mark.parametrize("name", FILE_COLUMNS)
@pytest.mark.parametrize("value", ["notes.txt", "q17", 3, ["a.py"], True])
def test_a_file_of_another_kind_is_no_image(name: str, value: Any) -> None:
    found = read_turns(ASKED | {name: value}, RecordForm("vqa"))
    assert found.images == () and found.unknown_keys == (name,)


def test_of_several_the_first_of_the_table_is_read() -> None:
    record = ASKED | {"image_url": "https://x/1.png", "file_name": "2.png", "img": "3.png"}
    assert images_of(record) == ("3.png",)
    assert images_of(record | {"img": ""}) == ("https://x/1.png",)
    assert images_of(record | {"image": "4.png"}) == ("4.png",)


def test_images_that_the_turns_name_go_before() -> None:
    part = {"type": "image", "image": "1.png"}
    shown = {"messages": [{"role": "user", "content": [part]}, TURNS["messages"][1]]}
    assert images_of(shown | {"image_path": "2.png"}) == ("1.png",)
    empty = {"messages": [{"role": "user", "content": [{"type": "image"}]}, TURNS["messages"][1]]}
    assert images_of(empty | {"image_path": "2.png"}) == ("2.png",)


def test_a_column_that_plays_another_part_is_that() -> None:
    record = {"picture": "What is a.png?", "answer": "A", "bild": "0.png", "img": "1.png"}
    form = find_form([record], {"question": "picture", "image": "bild"}, "here")
    found = read_turns(record, form)
    assert found.images == ("0.png",) and found.unknown_keys == ("img",)
    assert found.turns[0].text == "What is a.png?"
    asked = find_form([record], {"question": "picture"}, "here")
    assert read_turns(record, asked).images == ("1.png",)


def test_a_column_that_is_left_out_is_not_there() -> None:
    record = ASKED | {"image_path": "0.png", "imgae": "1.png", "choices": ["a"]}
    names = ("image_path", "imgae", "choices")
    form = find_form([record], None, "here", ignored=names)
    found = read_turns(record, form)
    assert found.images == () and found.unknown_keys == ()
    assert read_columns(form, [*ASKED, *names]) == ["question", "answer"]
    assert form.digest != RecordForm("vqa").digest and form.unused(["a", "imgae"]) == ("a",)


@pytest.mark.parametrize(
    "value",
    [
        "a.jpg", "/data/A B.JPEG", "c:\\x\\y.png", "https://x.org/a.webp?s=1#t", "s3://b/k.tiff",
        PNG, {"bytes": PNG, "path": None}, {"url": "https://x/a.gif"}, ["a.png"], [["a.png"]],
        base64.b64encode(PNG).decode(), "data:image/png;base64,aGk=", "data:image/svg+xml,<svg/>",
        '["a.png", "b.png"]', {"meta": 1, "image_path": "a.bmp"},
    ],
)  # fmt: skip
def test_what_looks_like_an_image(value: Any) -> None:
    assert looks_like_images("extra", value)


@pytest.mark.parametrize(
    "value",
    [
        "", "a cat", "https://x.org/page.html", "https://x.org", "jpg", 3, True, None, [], {},
        b"%PDF-1.7", "data:text/plain;base64,aGk=", "a.jpg\nis a picture", ["cat", "dog"], "[oops",
        {"license": "a.jpg"}, {"meta": {"url": "a.jpg"}},
    ],
)  # fmt: skip
def test_what_does_not(value: Any) -> None:
    assert not looks_like_images("extra", value)


def test_an_address_in_a_column_of_images_is_one() -> None:
    for name in ("image_link", "photo", "thumbnailUrl", "IMG"):
        assert looks_like_images(name, "https://x.org/12345")
    assert not looks_like_images("link", "https://x.org/12345")


def test_another_name_of_an_image_that_is_shown_is_no_other_image() -> None:
    shown = file_names([{"bytes": PNG, "path": "COCO_1.jpg"}, "https://x/b.png?w=1"])
    assert shown == {"", "coco_1.jpg", "b.png"}
    assert not looks_like_images("file_name", "train/COCO_1.jpg", shown)
    assert not looks_like_images("names", ["b.png", "COCO_1.jpg"], shown)
    assert looks_like_images("file_name", "train/COCO_2.jpg", shown)
    assert looks_like_images("names", ["b.png", "c.png"], shown)
    assert looks_like_images("mask", PNG, shown)


@pytest.mark.parametrize(
    "name", ["image_id", "imageId", "img_ids", "ImageName", "img", "image_key"]
)
def test_names_that_say_which_image_a_record_is_about(name: str) -> None:
    assert identifies_an_image(name, 458752) and identifies_an_image(name, "n161313")
    assert not identifies_an_image(name, True) and not identifies_an_image(name, "")
    for other in ("question_id", "image_width", "num_images", "has_image", "imagenet"):
        assert not identifies_an_image(other, 3)


def test_a_record_without_such_a_column_is_itself() -> None:
    record = ASKED | {"source": "a.jpg", "x" * 10_000: "a.jpg"}
    assert with_images(record) is record


def test_a_cell_with_much_in_it_is_looked_at_in_part() -> None:
    deep: Any = "a.png"
    for _ in range(20_000):
        deep = [deep]
    assert not looks_like_images("extra", deep)
    assert not looks_like_images("extra", {"image": [None] * 10**6})
