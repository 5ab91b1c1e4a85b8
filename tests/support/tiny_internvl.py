"""A tiny InternVL: tiles of 32 pixels, 4 x 4 patches, 2 x 2 tokens.

`crop_to_patches` is false in the processor's file, as in the published ones: the processor class
cuts all the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.stock import StockRules
from support.tiny_family import PLAIN_ROPE, TEXT, TinyFamily, id_of

TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>")
TILE_TOKENS = 4

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<IMG_CONTEXT>\n' -}}
{%- elif part.type == 'video' -%}{{- '<video>\n' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""ChatML with the markers of InternVL3 and a line break after each."""

IMAGES = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "processor_class": "InternVLProcessor",
    "crop_to_patches": False,
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "size": {"height": 32, "width": 32},
    "min_patches": 1,
    "max_patches": 12,
}


def decoder(model_type: str, **others: Any) -> dict[str, Any]:
    """The text_config of a tiny decoder of that type."""
    return {
        **TEXT,
        "model_type": model_type,
        "vocab_size": TEXT["vocab_size"] + len(TOKENS),
        "num_hidden_layers": 2,
        "rope_parameters": PLAIN_ROPE,
        **others,
    }


def config(text: dict[str, Any] | None = None, **others: Any) -> Any:
    """The transformers config, with the decoder of InternVL3 unless another is given."""
    from transformers import InternVLConfig

    return InternVLConfig(
        text_config=text if text is not None else decoder("qwen2"),
        vision_config={
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 112,
            "attention_bias": True,
            "image_size": [32, 32],
            "patch_size": [8, 8],
            "initializer_range": 0.1,
        },
        image_token_id=id_of(TOKENS, "<IMG_CONTEXT>"),
        image_seq_length=TILE_TOKENS,
        tie_word_embeddings=True,
        **others,
    )


def _cut(processor: Any, images: list[Any]) -> Any:
    """As InternVLProcessor calls it."""
    return processor(images=images, crop_to_patches=True, return_tensors="pt")


def _written(features: Any, processor: Any) -> str:
    return f"<img>{'<IMG_CONTEXT>' * (TILE_TOKENS * int(features['num_patches'][0]))}</img>"


def _media(features: Any) -> dict[str, Any]:
    return {"pixel_values": features["pixel_values"]}


INTERNVL = TinyFamily(
    config=config,
    stock=StockRules(placeholder="<IMG_CONTEXT>", call=_cut, written=_written, media=_media),
    images=IMAGES,
    tokens=TOKENS,
    token_counts=8,
    template=TEMPLATE,
    files={
        "processor_config.json": json.dumps(
            {"image_seq_length": TILE_TOKENS, "processor_class": "InternVLProcessor"}
        )
    },
)


def with_videos(folder: Path) -> Path:
    """A tiny model's folder with what published ones have for videos."""
    path = folder / "tokenizer_config.json"
    tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    settings = json.loads(path.read_text()) | {"extra_special_tokens": tokens}
    path.write_text(json.dumps(settings))
    content = json.loads((folder / "preprocessor_config.json").read_text())
    own = ("size", "image_mean", "image_std", "resample", "rescale_factor")
    video = {"video_processor_type": "InternVLVideoProcessor"} | {k: content[k] for k in own}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder
