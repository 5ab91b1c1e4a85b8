"""What travels with pixels that were sent as levels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelTable:
    """What gives the pixels of a batch back from the levels that it travels with.

    Args:
        values: (K * 256,) float32, the pixel of each level in each of K kinds of columns.
        kinds: (D,) int32, the kind of each column of `Media.pixel_values`.
    """

    values: Tensor
    kinds: Tensor
