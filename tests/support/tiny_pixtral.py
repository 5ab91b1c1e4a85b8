"""Tiny Mistral 3 and Pixtral (LLaVA's class with Pixtral's tower)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from support.stock import Media, StockRules
from support.tiny_family import PLAIN_ROPE, TEXT, TinyFamily, id_of

TOKENS = (
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '[INST]' -}}
{%- for part in message['content'] -%}
{{- '[IMG]' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{{- '[/INST]' -}}
{%- elif message['role'] == 'system' -%}
{{- '[SYSTEM_PROMPT]' + message['content'][0]['text'] + '[/SYSTEM_PROMPT]' -}}
{%- else -%}
{{- message['content'][0]['text'] + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""
"""As of Mistral Small 3.1: no generation prompt, and none needed."""


def decoder(model_type: str = "mistral", **others: Any) -> dict[str, Any]:
    """The text_config of a tiny decoder of that type."""
    return {
        **TEXT,
        "model_type": model_type,
        "vocab_size": TEXT["vocab_size"] + len(TOKENS),
        "num_hidden_layers": 2,
        "head_dim": 24,
        "rope_parameters": PLAIN_ROPE,
        **others,
    }


VISION = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 128,
    "patch_size": 8,
    "initializer_range": 0.1,
}


def mistral3(text: dict[str, Any] | None = None) -> Any:
    """The transformers config; by default with a sliding window that the samples exceed."""
    from transformers import Mistral3Config

    return Mistral3Config(
        text_config=text if text is not None else decoder(sliding_window=24),
        vision_config=VISION,
        image_token_index=id_of(TOKENS, "[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


def _llava() -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(
        text_config=decoder(sliding_window=None),
        vision_config=VISION,
        image_token_index=id_of(TOKENS, "[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


def _images(longest_edge: int) -> dict[str, Any]:
    return {
        "image_processor_type": "PixtralImageProcessor",
        "processor_class": "PixtralProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": {"height": 8, "width": 8},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": longest_edge},
    }


def _stock(side: int) -> StockRules:
    """The rules for tokens of `side` pixels."""

    def call(processor: Any, images: list[Any]) -> Any:
        return processor(images=images, patch_size=side, return_tensors="pt")

    def written(features: Any, processor: Any) -> str:
        height, width = features["image_sizes"][0].tolist()
        line = "[IMG]" * (width // side) + "[IMG_BREAK]"
        return (line * (height // side)).removesuffix("[IMG_BREAK]") + "[IMG_END]"

    return StockRules(
        placeholder="[IMG]",
        call=call,
        written=written,
        join=_join,
        answer=re.compile(r"(?<=\[/INST\]).*?<\|im_end\|>", re.DOTALL),
    )


def _join(media: Sequence[Media]) -> Media:
    """Images of several samples, padded to the largest."""
    pixels = [image for item in media for image in item["pixel_values"]]
    height, width = (max(image.shape[axis] for image in pixels) for axis in (1, 2))
    return {
        "pixel_values": torch.stack(
            [
                F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1]))
                for image in pixels
            ]
        ),
        "image_sizes": torch.cat([item["image_sizes"] for item in media]),
    }


MISTRAL3 = TinyFamily(
    config=mistral3,
    stock=_stock(16),
    images=_images(256),
    tokens=TOKENS,
    template=TEMPLATE,
    files={"processor_config.json": '{"patch_size": 8, "spatial_merge_size": 2}'},
)
LLAVA = TinyFamily(
    config=_llava,
    stock=_stock(8),
    images=_images(208),
    tokens=TOKENS,
    template=TEMPLATE,
    files={"processor_config.json": '{"patch_size": 8}'},
)
