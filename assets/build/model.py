"""The tiny Qwen2.5-VL: its configuration, image processor and random initialisation."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

PATCH_SIZE = 14
MERGE_SIZE = 2
MAX_IMAGE_TOKENS = 1024

VISION_CONFIG = {
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
TEXT_CONFIG = {
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


def make_config(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """The configuration; token ids come from `tokenizer`, the vocabulary is padded to 64s."""
    token = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in (
        "endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end"
    )}  # fmt: skip
    text = TEXT_CONFIG | {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "bos_token_id": token["endoftext"],
        "eos_token_id": token["im_end"],
        "pad_token_id": token["endoftext"],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=VISION_CONFIG,
        image_token_id=token["image_pad"],
        video_token_id=token["video_pad"],
        vision_start_token_id=token["vision_start"],
        vision_end_token_id=token["vision_end"],
        tie_word_embeddings=True,
    )


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


def make_model(config: Qwen2_5_VLConfig, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A randomly initialised float32 model."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    smooth_patch_filters(model.model.visual.patch_embed.proj.weight)
    generation = model.generation_config
    generation.eos_token_id = config.text_config.eos_token_id
    generation.pad_token_id = config.text_config.pad_token_id
    generation.bos_token_id = None
    generation.do_sample = False
    return model


def write_processors(folder: Path) -> None:
    """preprocessor_config.json, which also names the processor class for `AutoProcessor`."""
    image = IMAGE_PROCESSOR | {"processor_class": "Qwen2_5_VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")


def write_model(model: Qwen2_5_VLForConditionalGeneration, folder: Path) -> None:
    """Save a bfloat16 copy of the weights with config and generation config."""
    half = Qwen2_5_VLForConditionalGeneration(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.generation_config = model.generation_config
    half.save_pretrained(folder)
