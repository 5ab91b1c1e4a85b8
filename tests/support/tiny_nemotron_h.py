"""A tiny Nemotron-H: every kind of layer that it has."""

from __future__ import annotations

from typing import Any

import torch
from support.tiny_family import TEXT


def long_steps(name: str, parameter: Any) -> None:
    """Set steps and decays of Mamba-2's layers: fresh models draw steps from 0.001 to 0.1,
    and a scan of those adds next to nothing, with gradients below what is compared."""
    if name.endswith("mixer.dt_bias"):
        parameter.copy_(torch.linspace(-1.0, 0.5, parameter.numel()))
    if name.endswith("mixer.A_log"):
        parameter.copy_(torch.linspace(0.05, 0.5, parameter.numel()).log())


def nemotron_h() -> Any:
    """Two Mamba-2, an MLP, attention without positions, and a mixture of experts."""
    from transformers import NemotronHConfig

    return NemotronHConfig(
        **TEXT,
        layers_block_type=[
            "linear_attention",
            "mlp",
            "full_attention",
            "moe",
            "linear_attention",
        ],
        head_dim=24,
        ssm_state_size=12,
        mamba_num_heads=8,
        mamba_head_dim=20,
        n_groups=2,
        conv_kernel=4,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=48,
        tie_word_embeddings=False,
    )
