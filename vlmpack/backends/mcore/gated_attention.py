"""Self-attention with a gate on its output, in the order of transformers' weights.

Megatron keeps, of each query group, all its queries and then all its gates; transformers' `q_proj`
has each head's query and gate beside one another. Taken in that order here, the rows of a group are
a stretch of `q_proj`, `k_proj` and `v_proj` each, as they are without a gate, and so is what
adapters put beside them.

    rows of one group    q0 g0 q1 g1 ... | k | v
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class GatedSelfAttention(SelfAttention):
    """Megatron's self-attention where `attention_output_gate` is set."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(T', 1, D) -> queries (T', 1, Hq, d), keys and values (T', 1, Hkv, d), and the gates."""
        mixed, _bias = self.linear_qkv(hidden_states)
        width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = 2 * self.num_attention_heads_per_partition // groups
        both, key, value = mixed.unflatten(-1, (groups, -1)).split(
            (heads * width, width, width), dim=-1
        )
        query, gate = both.reshape(*both.shape[:2], -1, 2 * width).chunk(2, dim=-1)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate
