"""The example of each layout in the documentation is read as the page says, and can be encoded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from data.columns.example_layouts import FOLDER, WANTED
from support.shards import ROOT

from vlmpack.data.columns.form import RecordForm, find_form, read_turns
from vlmpack.data.columns.layouts import LAYOUTS, layout_named
from vlmpack.data.files.images import ImageRoot
from vlmpack.encode import Encoder, VLMSample
from vlmpack.encode.sample import ImagePart, Message

PLACED = {
    "messages": [False, False, True],
    "preference": [True, False],
    "prompt-completion": [True, False],
    "alpaca": [True, False],
    "vqa": [True, True, True],
    "cauldron": [True, True],
    "rounds": [False, True],
}
"""Whose images have no place in their record; none of the other layouts'."""


def records_of(name: str) -> list[dict[str, Any]]:
    """Of its example."""
    lines = (FOLDER / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def said(turn: Message, images: tuple[str, ...], role: str = "") -> tuple[str, str]:
    """Who says what, with images by their names."""
    text = "".join(
        f"[{images[part.index]}]" if isinstance(part, ImagePart) else part.text
        for part in turn.parts
    )
    return role or (turn.role if turn.learn else "not learnt"), text


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_chosen", [False, True])
def test_an_example_is_read_as_documented(name: str, is_chosen: bool) -> None:
    records = records_of(name)
    form = find_form(records, name if is_chosen else None, "here")
    chat = name in ("messages", "llava", "sharegpt")
    assert form == RecordForm(name if is_chosen or not chat else "chat", (), is_chosen)
    found, put_first = [], []
    for record in records:
        turns = read_turns(record, form)
        names = tuple(str(image) for image in turns.images)
        put_first.append(turns.put_first)
        found.append(
            [said(turn, names) for turn in turns.turns]
            + [
                said(turn, names, role)
                for role, answer in zip(("chosen", "rejected"), turns.answers, strict=False)
                for turn in answer
            ]
        )
        assert turns.unknown_keys == (("answers",) if "multiple_choice_answer" in record else ())
    assert found == WANTED[name]
    assert put_first == PLACED.get(name, [False] * len(records))


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_example_can_be_encoded(name: str, encoder: Encoder) -> None:
    form = find_form(records_of(name), None, "here")
    root = ImageRoot(str(FOLDER))
    for number, record in enumerate(records_of(name)):
        turns = read_turns(record, form)
        images = tuple(root.load(source).data for source in turns.images)
        assert images
        messages = turns.turns + (turns.answers[0] if turns.answers else ())
        sample = VLMSample(
            key=str(number), url="", messages=messages, images=images, inputs=turns.inputs
        )
        assert (encoder.encode(sample).labels >= 0).sum() > 0


def test_every_layout_has_an_example_and_a_row_on_the_page() -> None:
    assert WANTED.keys() == LAYOUTS.keys() == {path.stem for path in FOLDER.glob("*.jsonl")}
    page = Path(ROOT / "docs/layouts.md").read_text()
    for name in LAYOUTS:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        assert f"examples/data/{name}.jsonl" in row
        for key in layout_named(name).signatures[0].keys:
            assert re.search(rf"`{key}`", row), (name, key)
