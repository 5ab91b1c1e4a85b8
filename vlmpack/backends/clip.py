"""Scaling and clipping of gradients, all of them in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by one number that stays on its device.

    Args:
        tensors: of any shapes; of each dtype together.
        factor: 0-d.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, members in by_dtype.items():
        torch._foreach_mul_(members, factor.to(dtype))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a global norm are multiplied with, as torch's `clip_grad_norm_` has it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
