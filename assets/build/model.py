"""The tiny vision-language models: configurations, image processor and random initialisation.

Both know the same vocabulary and see the same images: patches of 14 pixels, merged 2 x 2, so that a
digit has about one token of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

PATCH_SIZE = 14
MERGE_SIZE = 2
MAX_IMAGE_TOKENS = 1024

QWEN2_5_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGE_SIZE,
    "temporal_patch_size": 2,
    # Windows of 4 x 4 tokens, about four digits; full attention every other block.
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
    "out_hidden_size": 128,
    "tokens_per_second": 2,
    "initializer_range": 0.05,
}
QWEN2_5_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    # Rows are one token high and up to ten wide: most frequencies go to the width axis, and the
    # low base keeps neighbouring columns distinguishable.
    "rope_parameters": {"rope_type": "default", "rope_theta": 200.0, "mrope_section": [2, 2, 12]},
}
QWEN3_5_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGE_SIZE,
    "temporal_patch_size": 2,
    "out_hidden_size": 128,
    # A learnt grid of 8 x 8, stretched over every image.
    "num_position_embeddings": 64,
    "initializer_range": 0.05,
}
QWEN3_5_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    # As published: three layers of GatedDeltaNet, then one of full attention.
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    # Half of each head turns. The axes take turns from the highest frequency on: time, height,
    # width, time ...; the low base keeps neighbouring columns distinguishable.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 200.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": PATCH_SIZE,
    "merge_size": MERGE_SIZE,
    "temporal_patch_size": 2,
    "size": {
        "shortest_edge": (PATCH_SIZE * MERGE_SIZE) ** 2,
        "longest_edge": MAX_IMAGE_TOKENS * (PATCH_SIZE * MERGE_SIZE) ** 2,
    },
}


@torch.no_grad()
def smooth_patch_filters(weight: torch.Tensor) -> None:
    """Start the patch filters (D, 3, 2, 14, 14) as smooth random ones that sum to zero.

    White noise, the usual start, answers mostly to the paper's brightness; filters that ignore a
    constant see the strokes from the first step.
    """
    filters = torch.randn(weight.shape[0], 1, PATCH_SIZE, PATCH_SIZE)
    padded = torch.nn.functional.pad(filters, (2, 2, 2, 2), mode="replicate")
    filters = torch.nn.functional.avg_pool2d(padded, 5, stride=1)
    filters -= filters.mean(dim=(2, 3), keepdim=True)
    filters *= 0.5 / filters.flatten(1).norm(dim=1)[:, None, None, None]
    weight.copy_(filters[:, :, None].expand_as(weight))


@torch.no_grad()
def start_states(model: PreTrainedModel) -> None:
    """Start convolutions and decays of GatedDeltaNet layers as models of that kind are trained.

    transformers fills the steps with ones, for published weights to replace: a state would forget
    within a token or two. Here steps are spread between 0.001 and 0.1 and decays between 1 and 16,
    as Mamba-2 does it (Dao and Gu 2024), so that a state lasts from one token to a thousand.
    """
    for layer in model.modules():
        if not hasattr(layer, "A_log"):
            continue
        steps = torch.empty_like(layer.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
        layer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus gives them back
        layer.A_log.copy_(torch.empty_like(layer.A_log).uniform_(1, 16).log())
        taps = layer.conv1d.weight
        taps.uniform_(-(taps.shape[-1] ** -0.5), taps.shape[-1] ** -0.5)


def nothing(_model: PreTrainedModel) -> None:
    """All weights start as transformers makes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One of the tiny models: which classes, how large."""

    folder: str
    """Its folder in `assets/`."""
    config: Callable[..., Any]
    model: Callable[..., PreTrainedModel]
    processor: str
    """The processor's class, for `AutoProcessor`."""
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    start: Callable[[PreTrainedModel], None] = nothing
    """What is initialised otherwise than transformers does."""


QWEN2_5_VL = Shape(
    folder="tiny-qwen2_5_vl",
    config=Qwen2_5_VLConfig,
    model=Qwen2_5_VLForConditionalGeneration,
    processor="Qwen2_5_VLProcessor",
    vision=QWEN2_5_VISION,
    text=QWEN2_5_TEXT,
)
QWEN3_5 = Shape(
    folder="tiny-qwen3_5",
    config=Qwen3_5Config,
    model=Qwen3_5ForConditionalGeneration,
    processor="Qwen3VLProcessor",
    vision=QWEN3_5_VISION,
    text=QWEN3_5_TEXT,
    start=start_states,
)


def make_config(tokenizer: Qwen2Tokenizer, shape: Shape) -> Any:
    """The configuration; token ids come from `tokenizer`, the vocabulary is padded to 64s."""
    token = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in (
        "endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end"
    )}  # fmt: skip
    text = {
        **shape.text,
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "bos_token_id": token["endoftext"],
        "eos_token_id": token["im_end"],
        "pad_token_id": token["endoftext"],
    }
    return shape.config(
        text_config=text,
        vision_config=dict(shape.vision),
        image_token_id=token["image_pad"],
        video_token_id=token["video_pad"],
        vision_start_token_id=token["vision_start"],
        vision_end_token_id=token["vision_end"],
        tie_word_embeddings=True,
    )


def make_model(config: Any, shape: Shape, seed: int) -> PreTrainedModel:
    """A randomly initialised float32 model."""
    torch.manual_seed(seed)
    model = shape.model(config).float()
    smooth_patch_filters(model.model.visual.patch_embed.proj.weight)
    shape.start(model)
    generation = model.generation_config
    generation.eos_token_id = config.text_config.eos_token_id
    generation.pad_token_id = config.text_config.pad_token_id
    generation.bos_token_id = None
    generation.do_sample = False
    return model


def write_processors(folder: Path, shape: Shape) -> None:
    """preprocessor_config.json, which also names the processor class for `AutoProcessor`."""
    image = IMAGE_PROCESSOR | {"processor_class": shape.processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")


def write_model(model: PreTrainedModel, shape: Shape, folder: Path) -> None:
    """Save a bfloat16 copy of the weights with config and generation config."""
    half = shape.model(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.generation_config = model.generation_config
    half.save_pretrained(folder)
