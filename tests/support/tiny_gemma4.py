"""Tiny Gemma 4 models in the three shapes that are published: with per-layer inputs and shared keys
and values, dense with image blocks, and the latter with experts.

Tokens are of 3 x 3 patches of 6 pixels, at most 70 an image: those are the smallest budget that the
stock processor takes. The window is shorter than an image.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from support.gemma_turns import ANSWER, gemma_template
from support.stock import StockRules, concatenate
from support.tiny_family import TEXT, TinyFamily, id_of

TOKENS = ("<|image>", "<image|>", "<|image|>")
POOL, PATCH = 3, 6
MAX_TOKENS = 70
WINDOW = 20
"""Less than a large image's tokens, and less than any sample's."""

IMAGES = {
    "image_processor_type": "Gemma4ImageProcessor",
    "processor_class": "Gemma4Processor",
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "image_seq_length": MAX_TOKENS,
    "max_soft_tokens": MAX_TOKENS,
    "patch_size": PATCH,
    "pooling_kernel_size": POOL,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 224, "width": 224},
}
"""The keys of the published processor_config.json; its size is read by nobody."""

TEXT_4 = {
    **TEXT,
    "head_dim": 24,
    "global_head_dim": 40,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.4,
            "rope_theta": 1000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
}
"""Two head sizes, of which one is rotated in part; a cap that bends most logits."""

PER_LAYER = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 20,
}
"""As E2B: two layers are read again, one of each kind, by three others; images are causal."""

DENSE = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
"""As 31B: values that are the keys, and fewer heads of them, in layers with full attention."""

MIXTURE = {
    **DENSE,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 56,
}
"""As 26B-A4B: experts beside the MLP."""

VISION = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "patch_size": PATCH,
    "pooling_kernel_size": POOL,
    "position_embedding_size": 256,
    "initializer_range": 0.1,
}


HEAD_NORMS = {"q_norm": 0.4, "k_norm": 0.4}
"""Scores are products of normed heads, of up to 40 channels, and nothing divides them: with weights
of about 1 attention picks one token, and its gradients are rounding for the most part (stock in
float32 is 3e-5 from itself in double). Trained weights are small, too."""


def text(shape: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The text_config of a shape."""
    vocabulary = TEXT["vocab_size"] + len(TOKENS)
    sizes = {"vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary}
    return {**TEXT_4, **sizes, **shape, **others}


def config(shape: dict[str, Any], vision: dict[str, Any], **others: Any) -> Any:
    """The transformers config of a shape with a tower."""
    from transformers import Gemma4Config

    return Gemma4Config(
        text_config=text(shape),
        vision_config={**VISION, **vision},
        boi_token_id=id_of(TOKENS, TOKENS[0]),
        eoi_token_id=id_of(TOKENS, TOKENS[1]),
        image_token_id=id_of(TOKENS, TOKENS[2]),
        tie_word_embeddings=True,
        **others,
    )


def text_config() -> Any:
    """The language model's alone, with per-layer inputs, and a head of its own."""
    from transformers import Gemma4TextConfig

    sizes = {"vocab_size": TEXT["vocab_size"], "vocab_size_per_layer_input": TEXT["vocab_size"]}
    return Gemma4TextConfig(**text(PER_LAYER, **sizes, tie_word_embeddings=False))


def _written(features: Any, _: Any) -> str:
    """What Gemma4Processor writes for an image."""
    count = int(features["num_soft_tokens_per_image"][0])
    return f"{TOKENS[0]}{TOKENS[2] * count}{TOKENS[1]}"


def _media(features: Any) -> dict[str, Any]:
    return {name: features[name] for name in ("pixel_values", "image_position_ids")}


def _seen(media: dict[str, Any]) -> dict[str, Any]:
    """Without the patches that pad every image: the processor fills its budget, the tower needs
    only what the largest has."""
    places = media["image_position_ids"]
    longest = int((places >= 0).all(dim=-1).sum(dim=1).max())
    return {name: value[:, :longest] for name, value in media.items()}


STOCK = StockRules(
    placeholder=TOKENS[2],
    written=_written,
    media=_media,
    seen=_seen,
    kinds="mm_token_type_ids",
    join=concatenate,
    answer=ANSWER,
)


def tiny(shape: dict[str, Any], **vision: Any) -> TinyFamily:
    """A tiny model of a shape."""
    return TinyFamily(
        config=lambda: config(shape, vision),
        stock=STOCK,
        images=IMAGES,
        tokens=TOKENS,
        token_counts=10,
        template=gemma_template("<|image|>"),
        scaled=HEAD_NORMS,
    )


GEMMA4 = tiny(PER_LAYER, use_clipped_linears=True)
GEMMA4_DENSE = tiny(DENSE, standardize=True)
GEMMA4_MIXTURE = tiny(MIXTURE, standardize=True)

VIDEO = "<|video|>"


def tiny_with_videos(shape: dict[str, Any], **vision: Any) -> TinyFamily:
    """The same with the token of videos, and what transformers' processor asks of a folder."""
    tokens = (*TOKENS, VIDEO)
    count = TEXT["vocab_size"] + len(tokens)
    sizes = {"vocab_size": count, "vocab_size_per_layer_input": count}
    template = gemma_template("<|image|>").replace(
        "{%- elif part.type == 'text' -%}",
        "{%- elif part.type == 'video' -%}{{- '<|video|>' -}}{%- elif part.type == 'text' -%}",
    )
    names = ("patch_size", "pooling_kernel_size", "max_soft_tokens", "do_normalize", "resample")
    video = {"video_processor_type": "Gemma4VideoProcessor"} | {n: IMAGES[n] for n in names}
    processor = {
        "processor_class": "Gemma4Processor",
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "image_processor": IMAGES,
        "video_processor": video,
    }
    return replace(
        tiny(shape, **vision),
        config=lambda: config({**shape, **sizes}, vision, video_token_id=id_of(tokens, VIDEO)),
        tokens=tokens,
        template=template,
        files={"processor_config.json": json.dumps(processor)},
    )
