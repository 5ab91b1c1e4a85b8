"""Rotary frequencies: the plain rule, and the scaling of Llama 3."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor

from vlmpack.errors import CapabilityError


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Slow frequencies are divided by `factor`, fast ones kept, those in between interpolated, as
    Llama 3.1 does it for contexts beyond the one that it was pretrained on.

    Args:
        factor: divisor of the slow ones.
        low: wavelengths longer than `context / low` tokens are slow.
        high: wavelengths shorter than `context / high` tokens are fast.
        context: tokens of the first pretraining's context.
    """

    factor: float
    low: float
    high: float
    context: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        """(D / 2,) float32 -> (D / 2,) float32."""
        turns = self.context * frequencies / (2 * pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFrequencies:
    """What decides the frequencies.

    Args:
        theta: base.
        scaling: None for the plain rule.
    """

    theta: float
    scaling: Llama3Scaling | None = None

    @classmethod
    def from_transformers(cls, rope: dict[str, Any]) -> RopeFrequencies:
        """Read `rope_parameters` of a transformers config.

        Raises:
            CapabilityError: another rule.
        """
        kind = rope.get("rope_type", "default")
        if kind not in ("default", "llama3"):
            raise CapabilityError(
                f"rope_type {kind!r} is not in the mcore engine, which knows 'default' and "
                f"'llama3'; use model.backend: hf"
            )
        scaling = None
        if kind == "llama3":
            scaling = Llama3Scaling(
                factor=rope["factor"],
                low=rope["low_freq_factor"],
                high=rope["high_freq_factor"],
                context=rope["original_max_position_embeddings"],
            )
        return cls(theta=rope["rope_theta"], scaling=scaling)

    def inverse_frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        """(D / 2,) float32: theta^(-2i / D) (RoFormer, 2104.09864), scaled."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / (self.theta ** (exponents / head_dim))
        return self.scaling(frequencies) if self.scaling is not None else frequencies
