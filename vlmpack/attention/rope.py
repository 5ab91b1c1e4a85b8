"""Rotary positions for packed rows: cos and sin once per micro-batch, applied once per layer.

Positions are data: each sample's own, on 1 axis or 3 for MRoPE. So nothing here knows where a
segment begins, and any slice of a row takes the same code, with no loop over sequences and no host
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeLayout:
    """How position axes map to rotary frequencies.

    Args:
        mrope_section: frequencies per axis (temporal, height, width), which add up to D / 2. None
            for one axis. Source: the `mrope_section` of Qwen2-VL's configuration.
        interleaved: True if the axes alternate (t h w t h w ... t t), as in Qwen3-VL. False if each
            owns one block (t t .. h h .. w w), as in Qwen2-VL.
    """

    mrope_section: tuple[int, ...] | None = None
    interleaved: bool = False


def axis_of_frequency(layout: RopeLayout, num_frequencies: int) -> Tensor:
    """(D / 2,) int64: the position axis that drives each frequency."""
    if layout.mrope_section is None:
        return torch.zeros(num_frequencies, dtype=torch.int64)
    if sum(layout.mrope_section) != num_frequencies:
        raise ValueError(
            f"mrope_section {list(layout.mrope_section)} sums to {sum(layout.mrope_section)}, "
            f"but the head has {num_frequencies} frequencies"
        )
    sections = layout.mrope_section
    if not layout.interleaved:
        return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    for axis in range(1, len(sections)):
        axes[axis : sections[axis] * len(sections) : len(sections)] = axis
    return axes


def rope_cos_sin(
    position_ids: Tensor, inv_freq: Tensor, layout: RopeLayout
) -> tuple[Tensor, Tensor]:
    """cos and sin for the tokens of a row, computed in float32 whatever the model's dtype.

    Args:
        position_ids: (A, T) int64.
        inv_freq: (D / 2,) float32.

    Returns:
        Two (T, D / 2) float32 tensors, contiguous: every layer reads them.

    Raises:
        ValueError: the number of axes and the layout disagree; packed rows with one-dimensional
            positions in an MRoPE model train silently wrong, so this is never guessed.
    """
    axes_needed = len(layout.mrope_section) if layout.mrope_section is not None else 1
    if position_ids.ndim != 2 or position_ids.shape[0] != axes_needed:
        raise ValueError(
            f"position_ids have shape {tuple(position_ids.shape)}, expected ({axes_needed}, T)"
        )
    axis = axis_of_frequency(layout, inv_freq.shape[0]).to(position_ids.device, non_blocking=True)
    angles = (position_ids[axis].float() * inv_freq.float()[:, None]).T.contiguous()
    return angles.cos(), angles.sin()


class _Rotate(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin, saving cos and sin alone: the rotation's inverse is itself
    with the sign of sin changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, sign=-1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    """Rotation of (T, H, D) by sign * angle in float32 or wider, with no temporaries.

    One pass over whole heads and one over each half; `cos` is (T, 1, D), `sin` (T, 1, D / 2).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    rotated = wide * cos
    left, right = rotated.chunk(2, dim=-1)
    left.addcmul_(second, sin, value=-sign)
    right.addcmul_(first, sin, value=sign)
    return rotated.to(x.dtype)


def apply_rope(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Rotate queries and keys.

    Args:
        tensors: each (T, H, D), H may differ.
        cos: (T, D / 2) float32.
        sin: (T, D / 2) float32.

    Returns:
        The rotated tensors in their own dtypes. Gradients flow to them, not to cos and sin.
    """
    cos, sin = torch.cat((cos, cos), dim=-1)[:, None], sin[:, None]
    rotated: list[Tensor] = [_Rotate.apply(x, cos, sin) for x in tensors]  # type: ignore[no-untyped-call]
    return rotated
