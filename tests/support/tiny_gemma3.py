"""A tiny Gemma 3: tiles of 64 pixels, 8 x 8 patches, 4 x 4 tokens, a window shorter than an image.

The tokenizer has line breaks in a row as tokens, as Gemma's has: what is written around an image
merges with the breaks beside it.
"""

from __future__ import annotations

import json
from typing import Any

from support.gemma_turns import ANSWER, gemma_template
from support.stock import StockRules
from support.tiny_family import TEXT, TinyFamily, id_of

TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
BREAKS = ("\n\n", "\n\n\n", "\n\n\n\n")
TILE_TOKENS = 16
WINDOW = 12
"""Less than an image's tokens, and less than any sample's."""

IMAGES = {
    "image_processor_type": "Gemma3ImageProcessor",
    "processor_class": "Gemma3Processor",
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": 64, "width": 64},
}
"""Nulls as published."""


def text(**others: Any) -> dict[str, Any]:
    """The text_config: both kinds of layers, a linear scaling of the full ones' base."""
    return {
        **TEXT,
        "num_hidden_layers": 3,
        "head_dim": 24,
        "query_pre_attn_scalar": 40,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "tie_word_embeddings": True,
        **others,
    }


def config(**others: Any) -> Any:
    """The transformers config."""
    from transformers import Gemma3Config

    return Gemma3Config(
        text_config=text(vocab_size=TEXT["vocab_size"] + len(TOKENS) + len(BREAKS), **others),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 112,
            "image_size": 64,
            "patch_size": 8,
            "vision_use_head": False,
        },
        mm_tokens_per_image=TILE_TOKENS,
        boi_token_index=id_of(TOKENS, "<start_of_image>"),
        eoi_token_index=id_of(TOKENS, "<end_of_image>"),
        image_token_index=id_of(TOKENS, "<image_soft_token>"),
        tie_word_embeddings=True,
    )


def text_config() -> Any:
    """The language model's alone, with a head of its own."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**text(tie_word_embeddings=False))


def written(crops: int) -> str:
    """What Gemma3Processor writes for an image."""
    image = f"\n\n{TOKENS[0]}{TOKENS[2] * TILE_TOKENS}{TOKENS[1]}\n\n"
    if not crops:
        return image
    return (
        f"Here is the original image {image} and here are some crops to help you see better "
        + " ".join([image] * crops)
    )


def _media(features: Any) -> dict[str, Any]:
    return {"pixel_values": features["pixel_values"]}


STOCK = StockRules(
    placeholder="<image_soft_token>",
    marker="<start_of_image>",
    written=lambda features, processor: written(int(features["num_crops"][0])),
    media=_media,
    kinds="token_type_ids",
    answer=ANSWER,
)

GEMMA3 = TinyFamily(
    config=config,
    stock=STOCK,
    images=IMAGES,
    tokens=TOKENS,
    words=BREAKS,
    token_counts=0,
    template=gemma_template("<start_of_image>"),
    files={
        "processor_config.json": json.dumps(
            {"image_seq_length": TILE_TOKENS, "processor_class": "Gemma3Processor"}
        )
    },
)
