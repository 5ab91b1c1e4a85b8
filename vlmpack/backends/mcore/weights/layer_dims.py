"""Sizes of what a layer may have beside attention and an MLP, from the model folder's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

LINEAR = "linear_attention"
"""What config.json calls a layer that carries state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDims:
    """A mixture of experts.

    Args:
        count: experts of a layer.
        top_k: experts of a token.
        intermediate: width of an expert.
        layers: numbers of the layers that have experts; the others have one MLP.
        shared: width of the expert that all tokens pass; 0 without.
        shared_gate: whether that one is behind a gate of its own.
        score: what makes weights of router logits. `softmax`: over the chosen experts, which is
            that over all, renormalised. `sigmoid`: of each expert, renormalised over the chosen
            ones, which are chosen by these numbers and a bias that is no parameter.
        scaling: factor on the weights.
    """

    count: int
    top_k: int
    intermediate: int
    layers: frozenset[int]
    shared: int = 0
    shared_gate: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    scaling: float = 1.0

    @classmethod
    def from_transformers(cls, text: Any) -> ExpertDims | None:
        """Read a transformers text config; None without experts."""
        count = getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0)
        if not count:
            return None
        step = getattr(text, "decoder_sparse_step", 1)
        dense = set(getattr(text, "mlp_only_layers", None) or ())
        return cls(
            count=count,
            top_k=text.num_experts_per_tok,
            intermediate=text.moe_intermediate_size,
            layers=frozenset(
                layer
                for layer in range(text.num_hidden_layers)
                if layer not in dense and (layer + 1) % step == 0
            ),
            shared=getattr(text, "shared_expert_intermediate_size", 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetDims:
    """Layers of GatedDeltaNet instead of attention.

    Args:
        key_heads: heads of queries and keys, each of which serves as many of values.
        value_heads: heads of values.
        key_width: of a head's queries and keys.
        value_width: of a head's values.
        taps: of the convolution.
        layers: numbers of these layers.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    layers: frozenset[int]

    @property
    def keys(self) -> int:
        """Columns of all keys."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Columns of all values."""
        return self.value_heads * self.value_width

    @classmethod
    def from_transformers(cls, text: Any) -> DeltaNetDims | None:
        """Read a transformers text config; None without such layers."""
        kinds = getattr(text, "layer_types", None) or ()
        layers = frozenset(n for n, kind in enumerate(kinds) if kind == LINEAR)
        if not layers:
            return None
        return cls(
            key_heads=text.linear_num_key_heads,
            value_heads=text.linear_num_value_heads,
            key_width=text.linear_key_head_dim,
            value_width=text.linear_value_head_dim,
            taps=text.linear_conv_kernel_dim,
            layers=layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaDims:
    """Layers of Mamba-2.

    Args:
        heads: of the scan.
        head_dim: width of a head.
        groups: of heads that share what is written and read, and a norm.
        state: width of what is written and read.
        taps: of the convolution.
        conv_bias: whether the convolution has a bias.
        least_step: what steps are kept above.
        layers: numbers of these layers.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    conv_bias: bool
    least_step: float
    layers: frozenset[int]

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.heads * self.head_dim

    @property
    def written(self) -> int:
        """Columns of what all groups write, and of what they read."""
        return self.groups * self.state
