"""What a tiny model of a family is made of; `families.py` collects them.

Tokenizer and chat template are those of the committed tiny model unless the family says otherwise;
sizes are small, but no two that could be mistaken for one another are equal (a head's width times
their number is not the hidden size, the tower is not as wide as the language model, experts are not
square).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.stock import StockRules

TEXT = {
    "vocab_size": 576,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "pad_token_id": 568,
    "bos_token_id": 568,
    "eos_token_id": 570,
}
"""Ids are those of the committed tokenizer. 0.1 is about the square root of 1 / hidden_size: every
layer changes its input as much as it carries it, so gradients are no sums of tiny numbers."""

VISION_TOKENS = {
    "image_token_id": 574,
    "video_token_id": 575,
    "vision_start_token_id": 571,
    "vision_end_token_id": 572,
}
"""Of the committed tokenizer, as configs of Qwen-VL models name them."""

PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000.0}


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """A tiny model and the stock rules that its tests compare with.

    Args:
        config: makes the transformers config.
        stock: what the family's processor class does.
        images: the content of preprocessor_config.json; None for a language model.
        tokens: special tokens that the tokenizer gets, from id `FIRST_NEW_ID` on.
        words: plain tokens that it gets after those.
        template: chat template in place of the committed one.
        files: further files of the model folder.
        token_counts: 200 image sizes give more token counts than this; few where images are cut
            into tiles.
        unused: parts of the names of parameters whose results the class throws away.
        scaled: parts of the names of parameters that fresh ones are too large for, and a factor.
        settle: (name, parameter) -> sets values that random ones would not do for.
    """

    config: Callable[[], Any]
    stock: StockRules
    images: Mapping[str, Any] | None = None
    tokens: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    template: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    token_counts: int = 20
    unused: tuple[str, ...] = ()
    scaled: Mapping[str, float] = field(default_factory=dict)
    settle: Callable[[str, Any], None] | None = None


FIRST_NEW_ID = 576
"""The id of the first of `TinyFamily.tokens`: the vocabulary of the committed tokenizer ends
there, and so must that of the config begin anew (TEXT["vocab_size"] + len(tokens))."""


def id_of(tokens: tuple[str, ...], token: str) -> int:
    """The id that a new special token gets."""
    return FIRST_NEW_ID + tokens.index(token)
