"""Tiny Idefics3 and SmolVLM. The tiles of the latter are no whole number of patches, as SmolVLM's
published ones are not (384 pixels and patches of 14)."""

from __future__ import annotations

import re
from typing import Any

import torch
from support.stock import Media, StockRules
from support.templates import SMOLVLM
from support.tiny_family import PLAIN_ROPE, TEXT, TinyFamily, id_of
from torch import Tensor

AROUND, IMAGE, GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"
PLACES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3))
TOKENS = (AROUND, IMAGE, GLOBAL, "<end_of_utterance>", *PLACES)
"""As in published tokenizers some places have a token, and further ones are text."""


def _vision(image_size: int) -> dict[str, Any]:
    return {
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": image_size,
        "patch_size": 8,
        "initializer_range": 0.1,
    }


def _settings(image_size: int, scale_factor: int) -> dict[str, Any]:
    text = {**TEXT, "vocab_size": TEXT["vocab_size"] + len(TOKENS), "model_type": "llama"}
    return {
        "text_config": {**text, "num_hidden_layers": 2, "rope_parameters": PLAIN_ROPE},
        "vision_config": _vision(image_size),
        "scale_factor": scale_factor,
        "image_token_id": id_of(TOKENS, IMAGE),
    }


def _idefics3() -> Any:
    from transformers import Idefics3Config

    return Idefics3Config(**_settings(32, 2), tie_word_embeddings=False)


def _smolvlm() -> Any:
    from transformers import SmolVLMConfig

    return SmolVLMConfig(**_settings(28, 3), tie_word_embeddings=True)


def _images(name: str, tile: int, most: int) -> dict[str, Any]:
    """The content of preprocessor_config.json.

    Args:
        name: of the model in class names.
        tile: side of a tile in pixels.
        most: tiles along the longest edge.
    """
    return {
        "image_processor_type": f"{name}ImageProcessor",
        "processor_class": f"{name}Processor",
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.4, 0.5],
        "image_std": [0.5, 0.5, 0.6],
        "max_image_size": {"longest_edge": tile},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": most * tile},
    }


def _call(processor: Any, images: list[Any]) -> Any:
    """As the processor classes call it."""
    return processor(images=images, return_row_col_info=True, return_tensors="pt")


def _written(tokens_per_tile: int) -> Any:
    """What `replace_image_token` of the processor classes writes."""

    def written(features: Any, processor: Any) -> str:
        ((rows,),), ((columns,),) = features["rows"], features["cols"]
        run = IMAGE * tokens_per_tile
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{AROUND}<row_{row}_col_{column}>{run}"
            text += "\n"
        return (
            f"{text}\n{AROUND}{GLOBAL}{run}{AROUND}" if text else f"{AROUND}{GLOBAL}{run}{AROUND}"
        )

    return written


def _media(seen: int) -> Any:
    """What the forward takes of the features, by the side of a tile in pixels that the tower
    sees."""

    def media(features: Any) -> Media:
        assert bool(features["pixel_attention_mask"].all())
        return {"pixel_values": features["pixel_values"][..., :seen, :seen]}

    return media


def _join(media: Any) -> dict[str, Tensor]:
    """Tiles of several samples as those of one: a row's tiles are found by their order."""
    return {"pixel_values": torch.cat([item["pixel_values"] for item in media], dim=1)}


def _stock(tokens_per_tile: int, seen: int) -> StockRules:
    return StockRules(
        placeholder=IMAGE,
        call=_call,
        written=_written(tokens_per_tile),
        media=_media(seen),
        join=_join,
        answer=re.compile(SMOLVLM.answer, re.DOTALL),
    )


IDEFICS3 = TinyFamily(
    config=_idefics3,
    stock=_stock(4, 32),
    images=_images("Idefics3", 32, 4),
    tokens=TOKENS,
    template=SMOLVLM.text,
    token_counts=3,
)
SMOL = TinyFamily(
    config=_smolvlm,
    stock=_stock(1, 24),
    images=_images("SmolVLM", 28, 3),
    tokens=TOKENS,
    template=SMOLVLM.text,
    token_counts=2,
)
