"""Bytes of AdamW's moments under the hf engine, by what keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from vlmpack.recipe.trainable import (
    BLOCK,
    FACTS,
    LEAST_IN_8_BITS,
    LEAST_PAGED,
    OptimizerFacts,
)


class MomentBytes(NamedTuple):
    """Bytes on the device, and bytes in pages, which may leave it."""

    held: int
    paged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentSizes:
    """What the moments of trained parameters take; two float32 numbers each by default.

    Args:
        facts: of the optimizer.
        small: trained elements of tensors whose moments stay in 32 bits.
        short: trained elements of tensors whose moments are in no page.
    """

    facts: OptimizerFacts = FACTS["adamw"]
    small: int = 0
    short: int = 0

    @classmethod
    def of(cls, facts: OptimizerFacts, trained: Iterable[tuple[int, ...]]) -> MomentSizes:
        """Those of an optimizer over parameters of these shapes."""
        sizes = [prod(shape) for shape in trained]
        return cls(
            facts=facts,
            small=sum(size for size in sizes if size < LEAST_IN_8_BITS),
            short=sum(size for size in sizes if size < LEAST_PAGED),
        )

    def bytes_of(self, updated: int) -> MomentBytes:
        """The bytes of two moments.

        Args:
            updated: elements that are.
        """
        facts = self.facts
        small = self.small if facts.in_8_bits else 0
        scales = 2 * 4 * (updated - small) // BLOCK if facts.in_8_bits else 0
        each = 2 if facts.in_8_bits else 8
        paged = each * (updated - self.short) if facts.paged else 0
        return MomentBytes(8 * small + each * (updated - small) - paged + scales, paged)

    @property
    def words(self) -> str:
        """Bytes of the moments of a parameter."""
        each = "8"
        if self.facts.in_8_bits:
            each = f"2.03 (of tensors from {LEAST_IN_8_BITS:,} elements, else 8)"
        return f"{each}, in pages of the host where the GPU is full," if self.facts.paged else each
