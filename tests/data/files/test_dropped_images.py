"""Columns of images that nobody reads: what is found in the first records, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vlmpack.data.columns.form import RecordForm
from vlmpack.data.files.source_form import FIRST_RECORDS, find_dropped

VQA = RecordForm("vqa")


def records(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Questions and answers, with these columns beside them in each."""
    return [{"question": f"Q{n}", "answer": "A", **columns} for n in range(count)]


@pytest.mark.parametrize(("with_it", "is_refused"), [(501, True), (500, False), (0, False)])
def test_more_than_half_of_the_first_records_refuse_a_column(
    with_it: int, is_refused: bool
) -> None:
    some = records(with_it, scan="a.png") + records(FIRST_RECORDS - with_it, scan="none")
    for order in (some, some[::-1]):
        later = records(5000, scan="b.png" if with_it == 500 else "none")
        assert (find_dropped([*order, *later], VQA).columns == ["scan"]) is is_refused


def test_of_a_short_source_more_than_half_do() -> None:
    assert find_dropped(records(2, scan="a.png") + records(1), VQA).columns == ["scan"]
    assert find_dropped(records(1, scan="a.png") + records(1), VQA).columns == []
    assert find_dropped([], VQA).columns == []


def test_no_more_records_are_asked_for_than_decide() -> None:
    asked = []

    def each(value: str) -> Iterator[dict[str, Any]]:
        for record in records(10_000, scan=value):
            asked.append(record)
            yield record

    assert find_dropped(each("a.png"), VQA).columns == ["scan"] and len(asked) == 501
    asked.clear()
    assert not find_dropped(each("none"), VQA).columns and len(asked) <= FIRST_RECORDS


@pytest.mark.parametrize("name", ["url", "URL", "source", "id", "license", "__key__", "__url__"])
def test_where_a_record_is_from_is_no_image(name: str) -> None:
    for value in ("https://x.org/a.jpg", "a.jpg"):
        assert find_dropped(records(9, **{name: value}), VQA).columns == []


def test_what_is_read_or_left_out_is_not_dropped() -> None:
    assert find_dropped(records(9, image="a.png"), VQA).columns == []
    assert find_dropped(records(9, image_path="a.png"), VQA).columns == []
    assert find_dropped(records(9, images=["a.png"], file_name="x/a.png"), VQA).columns == []
    form = RecordForm("vqa", (("image", "scan"),), True)
    assert find_dropped(records(9, scan="a.png", image="old.png"), form).columns == []
    assert (
        find_dropped(records(9, scan="a.png"), RecordForm("vqa", ignored=("scan",))).columns == []
    )


def test_a_second_image_beside_one_that_is_read_is_dropped() -> None:
    for other in ("image_path", "file_name", "mask", "decoded_image"):
        found = find_dropped(records(9, image="a.png", **{other: "b.png"}), VQA)
        assert found.columns == [other] and found.reads_some
        assert "a list under 'images'" in found.problem("here")
    form = RecordForm("vqa", (("image", "left"),), True)
    assert find_dropped(records(9, left="a.png", right="b.png"), form).columns == ["right"]


def test_which_image_a_record_is_about_counts_where_none_is_read() -> None:
    assert find_dropped(records(9, image_id=7), VQA).columns == ["image_id"]
    assert find_dropped(records(9, image_id=7, image="a.png"), VQA).columns == []
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Q"}]
    turns = {"messages": [{"role": "user", "content": parts}], "image_id": 7}
    assert find_dropped([turns], RecordForm("chat")).columns == []


def test_the_message_names_column_count_value_and_both_remedies() -> None:
    problem = find_dropped(records(9, scan="a.png"), VQA).problem("data.train (x.jsonl)")
    for words in (
        "data.train (x.jsonl): nothing reads 'scan', but 9 of the first 9 records",
        "('a.png')",
        "--columns image=scan",
        "data.columns: {image: scan}",
        "data.ignore_columns: [scan]",
        "--ignore-columns scan",
    ):
        assert words in problem
    long = find_dropped(records(9, scan=b"\xff\xd8\xff" + b"x" * 10_000), VQA).problem("here")
    assert "(10,003 bytes)" in long
