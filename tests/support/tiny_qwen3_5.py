"""Tiny Qwen3.5: four layers of GatedDeltaNet and gated attention, and a tower without DeepStack."""

from __future__ import annotations

from typing import Any

import torch
from support.tiny_family import PLAIN_ROPE, TEXT, VISION_TOKENS

MILD = (0.02, 0.1)
"""The smallest and the largest decay A of a layer's heads, for comparisons with transformers' own
rule in float32: it takes a decay between two tokens as a difference of sums over a chunk and loses
digits where the decay is strong (published models draw A up to 16). The gradients of what makes the
decays are off by 3e-4 there, in its rule and not in ours. A test of strong decays is in double."""

_TEXT = {
    **TEXT,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 24,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    # At 0.1 float32 gradients of stock models with a delta rule are 1.5e-5 from those in double.
    "initializer_range": 0.05,
    "rope_parameters": {
        **PLAIN_ROPE,
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
_VISION = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 36,
    "initializer_range": 0.1,
}


def mild_decays(name: str, parameter: Any) -> None:
    """Set the decays of layers with a delta rule."""
    if name.endswith("linear_attn.A_log"):
        parameter.copy_(torch.linspace(*MILD, parameter.numel()).log())


def qwen3_5() -> Any:
    """Dense, with its tower."""
    from transformers import Qwen3_5Config

    return Qwen3_5Config(
        text_config={**_TEXT, "tie_word_embeddings": True},
        vision_config=_VISION,
        tie_word_embeddings=True,
        **VISION_TOKENS,
    )


def qwen3_5_moe() -> Any:
    """A mixture of experts, with its tower."""
    from transformers import Qwen3_5MoeConfig

    return Qwen3_5MoeConfig(
        text_config={**_TEXT, **_EXPERTS},
        vision_config=_VISION,
        tie_word_embeddings=False,
        **VISION_TOKENS,
    )


def qwen3_5_text() -> Any:
    """Dense, the language model alone."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**_TEXT, tie_word_embeddings=True)


def qwen3_5_moe_text() -> Any:
    """A mixture of experts, the language model alone."""
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(**_TEXT, **_EXPERTS)
