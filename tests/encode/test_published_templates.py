"""Templates written anew give the texts of those that the models were published with."""

from __future__ import annotations

import re

import pytest
from support.conversations import Conversation
from support.published_templates import OLDER_GEMMA, published_templates, published_texts
from support.record_published import applies, digest_of_drawn, render, shortened
from support.tool_templates import without_marks

NAMES = list(published_templates())
CASES = published_texts()["conversations"]


def text_of(name: str) -> str:
    return without_marks(published_templates()[name]).text


def differing(name: str, text: str) -> list[str]:
    """The cases whose text is not the published one."""
    found = []
    for case in CASES:
        expected = [each["text"] for each in case["texts"] if name in each["of"]]
        assert len(expected) == int(applies(case, name))
        conversation = Conversation(case["turns"], case.get("tools"), case.get("variables", {}))
        for published in expected:
            if shortened(render(text, conversation, prompt=case["prompt"])) != published:
                found.append(case["name"])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_they_give_the_published_texts(name: str) -> None:
    assert differing(name, text_of(name)) == []


@pytest.mark.cases(quick=("Qwen3.6", "Nemotron 3 Nano"), slow="Gemma 4, E2B and E4B")
@pytest.mark.parametrize("name", NAMES)
def test_they_give_the_published_texts_of_random_conversations(name: str) -> None:
    """By one digest over all of them."""
    assert digest_of_drawn(text_of(name), name) == published_texts()["drawn"][name]


def test_what_is_looked_at() -> None:
    """Plain ones, images, several turns, a system prompt, tools, calls, thoughts, thinking on and
    off: each for every model that has them."""
    assert len(CASES) > 20 and published_texts()["sources"].keys() == set(NAMES)
    for name in NAMES:
        own = [case for case in CASES if applies(case, name)]
        assert sum("tools" in case for case in own) >= (2 if name == OLDER_GEMMA else 7)
        assert sum(case["prompt"] for case in own) >= (0 if name == OLDER_GEMMA else 4)
        has_images = [case["name"] for case in own if '"image"' in repr(case).replace("'", '"')]
        assert len(has_images) == (0 if name.startswith("Nemotron") else 2)
    for source in published_texts()["sources"].values():
        assert re.fullmatch("[0-9a-f]{64}", source["sha256"]) and source["found"] and source["of"]


@pytest.mark.cases(quick="Qwen3.6", slow="Gemma 4, E2B and E4B")
@pytest.mark.parametrize("name", NAMES)
def test_a_template_without_one_line_break_gives_others(name: str) -> None:
    """The negative control: the break behind an end of turn, behind `<think>` or a channel."""
    text = text_of(name)
    pieces = [
        piece
        for piece in (r"'<|im_end|>\n'", r"'<think>\n'", r"\n</think>\n", r"<|turn>model\n")
        if piece in text
    ]
    for piece in pieces:
        assert len(differing(name, text.replace(piece, piece.replace(r"\n", "", 1)))) > 3, piece
    broken = text.replace(pieces[0], pieces[0].replace(r"\n", "", 1))
    assert digest_of_drawn(broken, name) != published_texts()["drawn"][name]
