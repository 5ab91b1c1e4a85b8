"""What the recipe knows of each optimizer: plain facts, for its rules, the engine and `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]

BITSANDBYTES = "bitsandbytes>=0.50"
"""What has those that torch has not, and 4-bit weights, as pip is told; extra `qlora`."""

LEAST_IN_8_BITS = 4096
"""Elements from which bitsandbytes keeps moments of a tensor in 8 bits; float32 below."""
BLOCK = 256
"""Elements of a tensor whose 8-bit moments share a float32 scale (2110.02861)."""
LEAST_PAGED = 100_000
"""Elements from which bitsandbytes puts moments of a tensor in pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """What the recipe knows of one optimizer."""

    in_8_bits: bool = False
    """Whether moments of large tensors are 8-bit codes, with a float32 scale for each block."""

    paged: bool = False
    """Whether moments of large tensors are in memory that the GPU and its host share by pages."""

    @property
    def is_torchs(self) -> bool:
        """Whether torch has it; else bitsandbytes."""
        return not self.in_8_bits and not self.paged


FACTS: Mapping[OptimizerName, OptimizerFacts] = {
    "adamw": OptimizerFacts(),
    "adamw_8bit": OptimizerFacts(in_8_bits=True),
    "paged_adamw": OptimizerFacts(paged=True),
    "paged_adamw_8bit": OptimizerFacts(in_8_bits=True, paged=True),
}
