"""Rotary frequencies: the plain rule, and the scaling of Llama 3."""

from __future__ import annotations

from collections.abc import Mapping
from math import pi
from typing import Any

import torch
from torch import Tensor

from vlmpack.errors import CapabilityError


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """(D / 2,) float32: theta^(-2i / D) (RoFormer, 2104.09864), scaled.

    Llama 3.1 divides slow frequencies by `factor`, keeps fast ones and interpolates those in
    between, for contexts beyond the one that it was pretrained on. Wavelengths longer than
    context / `low_freq_factor` tokens are slow, those shorter than context / `high_freq_factor` are
    fast; the context is that of the first pretraining.

    Args:
        rope: `rope_parameters` of a transformers config.
        head_dim: D, width of a head.

    Raises:
        CapabilityError: another rule.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise CapabilityError(
            f"rope_type {kind!r} is not in the mcore engine, which knows 'default' and "
            f"'llama3'; use model.backend: hf"
        )
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies: Tensor = 1.0 / (rope["rope_theta"] ** (exponents / head_dim))
    if kind == "default":
        return frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - kept) * frequencies / rope["factor"] + kept * frequencies
    return scaled
