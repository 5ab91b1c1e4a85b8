"""What is learnt equals transformers' own mask, token by token, where tokens join the template's
last character and the answer's first: " Yes", "\\n\\n"."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from support.images import conversation
from support.templates import MARKED, TEMPLATES, Template
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.sample import Message
from vlmpack.encode.token_places import written_by

PIECES = [
    *(" Yes", "Yes", "\n", "\n\n", " \n", " ", "  ", "No.", ".\n", "1", "user", "assistant\n"),
    *("\u00e9t\u00e9", "\u65e5\u672c", "\U0001f642", "\tx", ": ", "</think>\n\n", "a b", "y", "z"),
]

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZERS = ("qwen2", "whole text", "sentencepiece")


def pieces(draw: random.Random, most: int = 6) -> str:
    return "".join(draw.choices(PIECES, k=draw.randint(1, most)))


@cache
def backend_of(kind: str) -> Tokenizer:
    """Trained on such text as templates write, so that white space is joined with what follows."""
    draw = random.Random(7)
    heads = ("assistant ", "assistant\n", "model\n", "Assistant:", "[/INST]", "user\n", "\n\n")
    corpus = [draw.choice(heads) + pieces(draw) for _ in range(2000)]
    if kind == "sentencepiece":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.ByteFallback()
        # The bytes of characters that the vocabulary has not.
        known = [text for text in corpus if text.isascii()]
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<unk>", *bytes_], show_progress=False
        )
        backend.train_from_iterator(known, trainer)
        return backend
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level]) if kind == "qwen2" else level
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    return backend


@cache
def encoder_of(kind: str, template: Template, trims: bool = False) -> ChatEncoder:
    backend = Tokenizer.from_str(backend_of(kind).to_str())
    backend.add_special_tokens([AddedToken(name, special=True) for name in template.special])
    if trims:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    bos = [name for name in ("<|begin_of_text|>", "<bos>", "<s>") if name in template.special]
    named = {"bos_token": bos[0]} if bos else {}
    if "</s>" in template.special:
        named["eos_token"] = "</s>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = template.text
    return ChatEncoder(tokenizer, takes_images=template.takes_parts, marker=template.marker)


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


def with_whole_characters(found: Any, *, end: int | None) -> list[bool]:
    """Their mask, and all bytes of the character that it begins or ends in: where one character is
    several tokens, `char_to_token` takes one of them. And, of a template that leaves it out, the
    end of the turn."""
    mask = [bool(flag) for flag in found["assistant_masks"]]
    places = found["offset_mapping"]
    for at in range(len(mask) - 1, 0, -1):
        if mask[at] and places[at - 1] == (places[at][0], places[at][0]):
            mask[at - 1] = True  # <0xF0> <0x9F> ...: all but the last are at an empty place
    for at in range(1, len(mask)):
        if mask[at - 1] and (places[at] == places[at - 1] or found["input_ids"][at] == end):
            mask[at] = True
    return mask


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
