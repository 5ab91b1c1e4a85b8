"""What an `Encoder` is given beside its model folder."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmpack.limits import MAX_IMAGE_PIXELS
from vlmpack.recipe.data import ImagesSection

LossOn = Literal["assistant", "all"]
Learn = Literal["all_turns", "last_turn", "each_answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """Settings of an encoder. What an exported folder notes stands in for the last three where they
    are None.

    Args:
        loss_on: which tokens are targets: the assistant's turns, or every text token.
        learn: which answers are targets: of all turns, the last alone, or each, as a sample.
        pairs: whether samples are pairs of answers to one prompt. Others are refused then, as pairs
            are without it.
        share_prefix: whether samples say which prefixes they may share (`EncodedSample.prefixes`).
        max_image_pixels: images with more pixels are refused before they are decoded.
        budget: bounds on what an image costs, in place of the processor's own.
        date: what a chat template that reads the clock writes as today's; the clock's without a
            note. Other templates have none.
        chat_template_kwargs: the template's variables in all conversations.
        special_tokens: those that texts may spell.
    """

    loss_on: LossOn = "assistant"
    learn: Learn = "all_turns"
    pairs: bool = False
    share_prefix: bool = False
    max_image_pixels: int = MAX_IMAGE_PIXELS
    budget: ImagesSection = field(default_factory=ImagesSection)
    date: datetime.date | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    special_tokens: Sequence[str] | None = None
