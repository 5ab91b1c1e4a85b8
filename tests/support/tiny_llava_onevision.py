"""A tiny LLaVA-OneVision: tiles of 30 pixels, of which 3 x 3 patches of 8 are seen (the published
ones have 384 pixels and 27 x 27 patches of 14), grids of up to 4 x 4 tiles."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from support.stock import Media, StockRules
from support.tiny_family import PLAIN_ROPE, TEXT, TinyFamily, id_of
from torch.nn.functional import pad

TOKENS = ("<image>", "<video>")
TILE, PATCH, SEEN = 30, 8, 24
SIDES = [TILE * count for count in (1, 2, 3, 4)]
PINPOINTS = [[height, width] for height in SIDES for width in SIDES]
MAX_TILES = "anyres_max_4"

TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ '\n' + part['text'] }}{% endgeneration %}"
    "{% else %}{{ '\n' + part['text'] }}{% endif %}{% endfor %}"
    "{{'<|im_end|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As the published ones: images before the text of a turn, marks around what is learnt, and another
white space in the generation prompt than in an answered turn."""

IMAGES = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "processor_class": "LlavaOnevisionProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_grid_pinpoints": PINPOINTS,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": TILE, "width": TILE},
}


def config(**others: Any) -> Any:
    """The transformers config."""
    from transformers import LlavaOnevisionConfig

    return LlavaOnevisionConfig(
        text_config={
            **TEXT,
            "model_type": "qwen2",
            "vocab_size": TEXT["vocab_size"] + len(TOKENS),
            "num_hidden_layers": 2,
            "rope_parameters": PLAIN_ROPE,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 112,
            "image_size": TILE,
            "patch_size": PATCH,
            "vision_use_head": False,
            "initializer_range": 0.1,
        },
        image_token_index=id_of(TOKENS, "<image>"),
        video_token_index=id_of(TOKENS, "<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio=MAX_TILES,
        tie_word_embeddings=False,
        **others,
    )


def _nested(processor: Any, images: list[Any]) -> Any:
    """As LlavaOnevisionProcessor calls it for one conversation."""
    return processor(images=[images], return_tensors="pt")


def _written(features: Any, processor: Any) -> list[str]:
    """By the processor class's own method, which needs neither tokenizer nor torchvision."""
    from transformers import LlavaOnevisionProcessor

    own = object.__new__(LlavaOnevisionProcessor)
    own.image_processor, own.image_token = processor, "<image>"
    own.num_image_tokens = (TILE // PATCH) ** 2
    own.vision_aspect_ratio, own.vision_feature_select_strategy = MAX_TILES, "full"
    return [own.replace_image_token(features, index) for index in range(len(features.image_sizes))]


def _media(features: Any) -> Media:
    return dict(features)


def _join(parts: Sequence[Media]) -> Media:
    """Tiles are filled up to the most that an image has."""
    most = max(part["pixel_values"].shape[1] for part in parts)
    filled = [
        pad(part["pixel_values"], (0, 0) * 3 + (0, most - part["pixel_values"].shape[1]))
        for part in parts
    ]
    others = {
        name: torch.cat([part[name] for part in parts])
        for name in ("image_sizes", "batch_num_images")
    }
    return {"pixel_values": torch.cat(filled), **others}


def _seen(media: Media) -> Media:
    """The tower's convolution leaves out what is beside whole patches."""
    return {**media, "pixel_values": media["pixel_values"][..., :SEEN, :SEEN]}


LLAVA_ONEVISION = TinyFamily(
    config=config,
    stock=StockRules(
        placeholder="<image>",
        call=_nested,
        written_together=_written,
        media=_media,
        seen=_seen,
        join=_join,
        answer=re.compile(r"(?<=<\|im_start\|>assistant ).*?<\|im_end\|>", re.DOTALL),
    ),
    images=IMAGES,
    tokens=TOKENS,
    template=TEMPLATE,
    files={
        "processor_config.json": json.dumps(
            {
                "num_image_tokens": (TILE // PATCH) ** 2,
                "processor_class": "LlavaOnevisionProcessor",
                "vision_aspect_ratio": MAX_TILES,
                "vision_feature_select_strategy": "full",
            }
        )
    },
    token_counts=5,
    unused=("vision_tower.post_layernorm.",),
)
