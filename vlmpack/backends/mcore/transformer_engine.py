"""Transformer Engine's layers and attention for packed rows. Needs CUDA; never run so far.

Boundaries reach Transformer Engine as it wants them: logical offsets, and padded ones only where
they differ. Under context parallelism it cuts each sequence zigzag by the padded offsets, as
`packing.context` does, and exchanges keys and values in a ring.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from vlmpack.backends.mcore.attention import RowParams
from vlmpack.backends.mcore.router import PackedRouter, with_parts
from vlmpack.errors import CapabilityError


class RotatedTEAttention(TEDotProductAttention):
    """Transformer Engine's attention after our rotation of queries and keys."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowParams,
        **arguments: Any,
    ) -> Tensor:
        """(T', Hq, D), (T', Hkv, D), (T', Hkv, D) -> (T', Hq * D), T' = T / CP."""
        query, key = packed_seq_params.rotated(query, key)
        output: Tensor = super().forward(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params, **arguments
        )
        return output


def require_transformer_engine(device: torch.device) -> None:
    """Raise CapabilityError where Transformer Engine cannot run."""
    if device.type != "cuda":
        raise CapabilityError(
            f"model.attention: transformer_engine needs a CUDA device, this one is {device.type}; "
            f"use auto or segments"
        )
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        raise CapabilityError(
            f"model.attention: transformer_engine cannot be imported ({error}); install "
            f"transformer-engine[pytorch], or use auto"
        ) from error


def transformer_engine_layer(*, num_experts: int | None, qk_norm: bool) -> ModuleSpec:
    """A decoder layer's spec."""
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=num_experts, qk_layernorm=qk_norm)
    layer = spec.submodules
    dense = num_experts is None
    return with_parts(
        spec,
        mlp=layer.mlp if dense else with_parts(layer.mlp, router=PackedRouter),
        self_attention=with_parts(layer.self_attention, core_attention=RotatedTEAttention),
    )


__all__ = ["TENorm", "require_transformer_engine", "transformer_engine_layer"]
