"""Parts of a question or an answer in columns that a layout does not read are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpack.data.columns.form import (
    ANSWER_PARTS,
    LETTERS,
    QUESTION_PARTS,
    RecordForm,
    find_form,
    part_of,
    read_columns,
    read_turns,
)
from vlmpack.data.columns.layouts import LAYOUTS, layout_named
from vlmpack.errors import DataError

RECORDS: dict[str, dict[str, Any]] = {
    "vqa": {"question": "Q", "answer": "A"},
    "alpaca": {"instruction": "Q", "output": "A"},
    "query-response": {"query": "Q", "response": "A"},
    "prompt-completion": {"prompt": "Q", "completion": "A"},
    "caption": {"image": "0.png", "caption": "A"},
    "preference": {"prompt": "Q", "chosen": "A", "rejected": "B"},
}
"""One of each layout that makes turns of columns."""

WHOLE: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    {"texts": [{"user": "Q", "assistant": "A"}]},
    {"conversation": [{"human": "Q", "assistant": "A"}]},
]


def test_all_layouts_that_make_turns_are_tried() -> None:
    assert {name for name in LAYOUTS if layout_named(name).is_made} == RECORDS.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_a_part_beside_is_refused_in_every_layout_that_makes_turns(name: str) -> None:
    form, record = find_form([RECORDS[name]], None, "here"), RECORDS[name]
    others = {*QUESTION_PARTS, *ANSWER_PARTS, "optionA", "choice_1"} - layout_named(name).columns
    assert len(others) > 30
    for other in others:
        assert read_turns(record | {other: None}, form) == read_turns(record, form)
        with pytest.raises(DataError) as caught:
            read_turns(record | {other: "more"}, form)
        part = part_of(other)
        reason = caught.value.reason
        is_named = f"{other!r} beside its {part}. It would be lost" in reason
        assert is_named or "can be read as" in reason or "turns are written out" in reason, other
        if is_named:
            assert f"data.ignore_columns: [{other}]" in reason
            left_out = find_form([record], None, "here", ignored=(other,))
            assert read_turns(record | {other: "more"}, left_out).turns
        assert other in read_columns(form, [*record, other]), "a table's column is looked at"


def test_letters_are_options_where_there_are_two() -> None:
    form = RecordForm("vqa")
    options = dict.fromkeys(LETTERS[:4], "cat")
    with pytest.raises(DataError, match="'A' beside its question"):
        read_turns(RECORDS["vqa"] | options, form)
    assert read_turns(RECORDS["vqa"] | {"A": "cat"}, form).unknown_keys == ("A",)
    assert [*options] == [
        n for n in read_columns(form, [*RECORDS["vqa"], *options]) if n in options
    ]


@pytest.mark.parametrize("record", WHOLE, ids=lambda record: "+".join(record))
def test_turns_say_all_of_it(record: dict[str, Any]) -> None:
    found = read_turns(record | {"choices": ["a"], "solution": "S"}, find_form([record], None, "x"))
    assert found.unknown_keys == ("choices", "solution")


def test_what_alpaca_reads_is_no_part_beside() -> None:
    record = RECORDS["alpaca"] | {"input": "I"}
    assert read_turns(record, RecordForm("alpaca")).turns[0].text == "Q\nI"


def test_a_column_with_a_role_is_read() -> None:
    record = {"problem": "Q", "solution": "A", "image": "0.png"}
    form = find_form([record], {"question": "problem", "answer": "solution"}, "here")
    assert [turn.text for turn in read_turns(record, form).turns] == ["Q", "A"]
    assert read_columns(form, [*record, "question"]) == ["problem", "solution", "image"]


def test_other_names_are_counted_as_before() -> None:
    record = RECORDS["vqa"] | {"answers": ["A", "B"], "score": 3, "subject": "math"}
    assert read_turns(record, RecordForm("vqa")).unknown_keys == ("answers", "score", "subject")
