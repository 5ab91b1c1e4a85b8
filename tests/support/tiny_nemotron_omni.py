"""A tiny Nemotron Omni: every kind of layer, a tower whose table of places is smaller than some
images and larger than others, and an image processor that transformers has on torchvision alone."""

from __future__ import annotations

from typing import Any

from support.played_torchvision import processor_on_torchvision
from support.stock import StockRules
from support.tiny_family import TinyFamily, id_of
from support.tiny_nemotron_h import long_steps, nemotron_h

START, END, IMAGE = TOKENS = ("<img>", "</img>", "<image>")
PATCH = 8
LEAST, MOST = 24, 200
"""Patches of an image."""

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<image>' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

IMAGES = {
    "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
    "processor_class": "NemotronH_Omni_Reasoning_V3Processor",
    "patch_size": PATCH,
    "downsample_ratio": 0.5,
    "min_num_patches": LEAST,
    "max_num_patches": MOST,
    "max_model_len": 4096,
    "norm_mean": [0.48145466, 0.4578275, 0.40821073],
    "norm_std": [0.26862954, 0.26130258, 0.27577711],
}
"""With the former names of mean and deviation, as published files have them."""

VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2.5,
    "patch_size": PATCH,
    "image_size": 32,
    "max_img_size": 9 * PATCH,
    "num_cls_tokens": 2,
    "num_registers": 3,
    "video_temporal_patch_size": 2,
    "initializer_range": 0.1,
}


AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "conv_kernel_size": 3,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
    "projection_hidden_size": 28,
    "projection_bias": False,
}
"""A tower for sounds, for `audio_config`."""


def config(**others: Any) -> Any:
    """The transformers config."""
    from transformers import NemotronH_Omni_Reasoning_V3_Config

    text = nemotron_h().to_dict()
    text["vocab_size"] += len(TOKENS)
    settings = {
        "text_config": text,
        "vision_config": VISION,
        "projector_hidden_size": 80,
        "vision_hidden_size": VISION["hidden_size"],
        "image_token_id": id_of(TOKENS, IMAGE),
    }
    return NemotronH_Omni_Reasoning_V3_Config(**{**settings, **others})


def _written(features: Any, processor: Any) -> str:
    """What `replace_image_token` of the processor class writes."""
    rows, columns = features["image_grid_hw"][0].tolist()
    merge = round(1 / processor.downsample_ratio)
    return START + IMAGE * (rows * columns // merge**2) + END


NEMOTRON_OMNI = TinyFamily(
    config=config,
    stock=StockRules(placeholder=IMAGE, written=_written, processor=processor_on_torchvision),
    images=IMAGES,
    tokens=TOKENS,
    template=TEMPLATE,
    unused=("video_patch_projection",),
    settle=long_steps,
)
