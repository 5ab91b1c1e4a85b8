"""Words of a system prompt that a template takes as settings are not left out; those that it cuts
or alters are."""

from __future__ import annotations

from typing import Any

import pytest
from support.templates import SMOLLM3, chat_encoder

from vlmpack.encode.sample import said
from vlmpack.errors import DataError

TURNS = [("user", "Is it Seven?"), ("assistant", "It is Seven, said Eve.")]
ASKED = [
    "/no_think",
    "You are terse. /no_think",
    "Be /no_think brief.\nAlways.\n",
    "/think Be slow.",
    "You are terse.",
]


@pytest.mark.parametrize("system", ASKED)
def test_words_of_a_system_prompt_that_are_asked_of_the_template_are_taken(system: str) -> None:
    encoder = chat_encoder(SMOLLM3)
    turns = [("system", system), *TURNS]
    found = encoder.encode(tuple(said(role, text) for role, text in turns))  # type: ignore[arg-type]
    given = [{"role": role, "content": text} for role, text in turns]
    theirs: Any = encoder.tokenizer.apply_chat_template(
        given, return_dict=True, return_assistant_tokens_mask=True
    )
    assert found.input_ids == theirs["input_ids"]
    assert found.from_assistant == [bool(flag) for flag in theirs["assistant_masks"]]
    text = encoder.tokenizer.decode(found.input_ids)
    assert ("Mode: /no_think" in text) == ("/no_think" in system)


@pytest.mark.parametrize("words", ["own[:12]", "own | upper", "''"])
def test_a_system_prompt_that_is_cut_or_left_out_is_refused(words: str) -> None:
    text = SMOLLM3.text.replace("(own if own", f"({words} if own")
    assert text != SMOLLM3.text
    system = said("system", "You are terse. Do not say much more.")
    messages = (system, *(said(role, text) for role, text in TURNS))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="leaves the system prompt out"):
        chat_encoder(SMOLLM3._replace(text=text)).encode(messages)
