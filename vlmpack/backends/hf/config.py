"""What the recipe says about the model, for the hf engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlmpack.attention.varlen import AttentionName


@dataclass(frozen=True, slots=True, kw_only=True)
class HFEngineConfig:
    """What the recipe says about the model.

    Args:
        folder: model folder in transformers format.
        dtype: compute dtype; auto is bfloat16 on CUDA and float32 on CPU. Weights and moments
            stay float32.
        attention: varlen implementation of the language model.
        activation_checkpointing: recompute each layer in the backward pass.
        sharding: none (one process, or DDP) or fsdp (FSDP2).
    """

    folder: Path
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: AttentionName | Literal["auto"] = "auto"
    activation_checkpointing: bool = False
    sharding: Literal["none", "fsdp"] = "none"
