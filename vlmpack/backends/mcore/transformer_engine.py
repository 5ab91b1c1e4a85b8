"""Transformer Engine's layers and attention for packed rows. Needs CUDA.

Never run on a GPU yet. `tests/backends/mcore/test_te_contract.py` checks our arguments against its
signatures and its rule of cutting a row, by version. It also compares its layers with ours, with a
stand-in for its modules. Boundaries are physical ones, one tensor for all of its arguments (see
`attention.megatron_params`). Under context parallelism it cuts each segment zigzag by them, as
`packing.context` does, and exchanges keys and values in a ring.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from vlmpack.backends.mcore.attention import RowParams
from vlmpack.backends.mcore.router import PackedRouter
from vlmpack.backends.mcore.versions import with_parts


class RotatedTEAttention(TEDotProductAttention):
    """Transformer Engine's attention after our rotation of queries and keys."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        # megatron-core 0.16 passes only the fields of its own class, without this one. Then
        # Transformer Engine compares the boundaries on the host, in every layer.
        self.kept_packed_seq_params.add("pad_between_seqs")

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


def transformer_engine_layer(*, num_experts: int | None, qk_norm: bool) -> ModuleSpec:
    """A decoder layer's spec."""
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=num_experts, qk_layernorm=qk_norm)
    layer = spec.submodules
    dense = num_experts is None
    made: ModuleSpec = with_parts(
        spec,
        mlp=layer.mlp if dense else with_parts(layer.mlp, router=PackedRouter),
        self_attention=with_parts(layer.self_attention, core_attention=RotatedTEAttention),
    )
    return made


__all__ = ["TENorm", "transformer_engine_layer"]
