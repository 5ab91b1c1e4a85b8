"""Megatron's layers that are one thing alone: a mixer or an MLP, behind its norm and with its
residual sum. In the other's place the layer has nothing, as Megatron's own hybrids have it.

    kinds      linear_attention   mlp        full_attention   moe
    layer      norm, mixer, +     norm, MLP, +   norm, attention, +   norm, experts, +
"""

from __future__ import annotations

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import nn

from vlmpack.backends.mcore.versions import with_parts

MIXER = ("input_layernorm", "self_attention", "self_attn_bda")
MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")

_MIXERS = ("linear_attention", "full_attention")
"""Kinds that are a mixer; the others are an MLP."""


def one_part(layer: ModuleSpec, kind: str) -> ModuleSpec:
    """A layer without the part that its kind has not.

    Args:
        layer: with both.
        kind: `linear_attention`, `full_attention`, `mlp` or `moe`.
    """
    nothing = TransformerLayerSubmodules()
    gone = MLP if kind in _MIXERS else MIXER
    made: ModuleSpec = with_parts(layer, **{name: getattr(nothing, name) for name in gone})
    return made


def has_mixer(layer: nn.Module) -> bool:
    """Whether a layer mixes tokens."""
    return not isinstance(layer.self_attention, IdentityOp)
