"""Tokenizers that join the template's last character and the answer's first in one token: " Yes",
"\\n\\n"."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from support.templates import Template
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

from vlmpack.encode.chat import ChatEncoder

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
