"""Varlen attention and rotary positions for packed rows. It needs torch alone, and Triton for the
kernels of wide heads."""

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.rope import RopeLayout, apply_rope, rope_cos_sin
from vlmpack.attention.varlen import (
    AttentionChoice,
    VarlenAttention,
    choose_attention,
    dense_attention,
    segment_attention,
)

__all__ = [
    "AttentionChoice",
    "BlockMasks",
    "RopeLayout",
    "VarlenAttention",
    "apply_rope",
    "choose_attention",
    "dense_attention",
    "rope_cos_sin",
    "segment_attention",
]
