"""What is learnt equals transformers' own mask, token by token, where tokens join the template's
last character and the answer's first: " Yes", "\\n\\n"."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from encode.joining_tokenizers import TOKENIZERS, encoder_of, pieces, with_whole_characters
from support.images import conversation
from support.templates import MARKED, TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.markers import written_by
from vlmpack.encode.sample import Message


def random_conversation(draw: random.Random, *, system: bool) -> tuple[Message, ...]:
    said: list[Any] = [("system", [pieces(draw)])] if system and draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 3)):
        said += [("user", [pieces(draw)]), ("assistant", [pieces(draw)])]
    return conversation(*said).messages


def mask_of_transformers(encoder: ChatEncoder, messages: tuple[Message, ...]) -> Any:
    """Ids, mask and places of tokens by transformers alone."""
    said = [
        {
            "role": m.role,
            "content": [{"type": "text", "text": m.text}] if encoder.takes_images else m.text,
        }
        for m in messages
    ]
    return encoder.tokenizer.apply_chat_template(
        said,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )


def begins_inside_a_token(encoder: ChatEncoder, messages: Any, found: Any) -> bool:
    """Whether an answer begins behind the first character of a token that is learnt."""
    _, spans = render_jinja_template(
        [encoder.template._as_dicts(messages)],
        chat_template=encoder.tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **encoder.tokenizer.special_tokens_map,
    )
    places = zip(found["offset_mapping"], found["assistant_masks"], strict=True)
    learnt = [place for place, flag in places if flag]
    return any(start < a < end for a, _ in spans[0] for start, end in learnt)


CHATML = ("qwen2.5", "no prompt", "internvl", "llava-onevision", "marked", "qwen3")


@pytest.mark.cases(quick=("qwen2.5-*-30", "llama-3-*-30", "gemma-3-qwen2-30"), slow="mistral-*-30")
@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_transformers_token_by_token(name, kind, count):
    """Those of the published template, which has no marks, and of the same one with marks."""
    published, marked = encoder_of(kind, TEMPLATES[name]), encoder_of(kind, MARKED[name])
    end = (
        marked.tokenizer.convert_tokens_to_ids("<|im_end|>") if name == "llava-onevision" else None
    )
    draw = random.Random(f"{name} {kind}")
    joined = 0
    for _ in range(count):
        messages = random_conversation(draw, system=TEMPLATES[name].system)
        theirs = mask_of_transformers(marked, messages)
        expected = with_whole_characters(theirs, end=end)
        for encoder in (published, marked):
            ours = encoder.encode(messages)
            assert ours.input_ids == theirs["input_ids"]
            assert ours.from_assistant == expected, (encoder is marked, messages)
        assert 0 < sum(expected) < len(expected)
        joined += begins_inside_a_token(marked, messages, theirs)
    assert joined > count // 50 or name not in CHATML, "the tokenizer joins nothing"


@pytest.mark.parametrize("name", ["qwen2.5", "llava-onevision"])
def test_tokenizers_that_cut_white_space_off_their_places_learn_the_same(name):
    whole, cut = (encoder_of("qwen2", TEMPLATES[name], trims) for trims in (False, True))
    draw = random.Random(name)
    differ = 0
    for _ in range(50):
        messages = random_conversation(draw, system=True)
        assert cut.encode(messages) == whole.encode(messages)
        text = whole.render(messages)
        places = [
            encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            for encoder in (whole, cut)
        ]
        differ += places[0]["offset_mapping"] != places[1]["offset_mapping"]
    assert differ > 40, "nothing is cut off"


def test_tokens_of_spans_are_those_that_share_a_character():
    """By looking at every character of every token, over random places with empty ones."""
    draw = random.Random(3)
    shared = 0
    for _ in range(300):
        cuts = sorted(draw.choices(range(30), k=12))
        places = list(pairwise(cuts))
        spans = [tuple(sorted(draw.choices(range(31), k=2))) for _ in range(draw.randint(0, 3))]
        characters = {at for a, b in spans for at in range(a, b)}
        expected = [not characters.isdisjoint(range(a, max(b, a + 1))) for a, b in places]
        assert written_by(places, spans) == expected, (places, spans)
        shared += any(expected) and not all(expected)
    assert shared > 100
