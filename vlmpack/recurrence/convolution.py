"""Short causal convolutions inside the segments of a row, one filter a channel.

    y[t, d] = bias[d] + sum over k < W of weight[d, W - 1 - k] * x[t - k, d],
    where x[t - k] counts only if it lies in the segment of t

A row of two segments and three taps. A cell is the slot that tap k reads, and a dot is none:

    slot      a0 a1 a2 b0 b1
    k = 0     a0 a1 a2 b0 b1
    k = 1     .  a0 a1 .  b0
    k = 2     .  .  a0 .  .

Source: the depthwise convolution in front of the recurrence of Mamba (Gu and Dao 2023, section
3.4), as `torch.nn.Conv1d(groups=channels, padding=W - 1)` with the tail cut off computes it.

Shapes: T slots, D channels, W taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from vlmpack.errors import CapabilityError
from vlmpack.recurrence.rows import RowSegments

ACTIVATIONS = (None, "silu", "swish")
"""What may follow the convolution; the CUDA kernels know no others."""


class _Taps(torch.autograd.Function):
    """The sum over taps, saving its input alone.

    A tap that reads another segment is left out by a selection, not by a factor 0, which would
    spread NaN.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        width = weight.shape[1]
        y = x * weight[:, -1]
        for k in range(1, min(width, x.shape[0])):
            here = (offsets[k:] >= k)[:, None]
            y[k:].addcmul_(torch.where(here, x[:-k], 0), weight[:, width - 1 - k])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, offsets = ctx.saved_tensors
        width = weight.shape[1]
        grad_x, grad_weight = grad * weight[:, -1], torch.zeros_like(weight)
        grad_weight[:, -1] = (grad * x).sum(0)
        for k in range(1, min(width, x.shape[0])):
            here = (offsets[k:] >= k)[:, None]
            kept = torch.where(here, grad[k:], 0)
            grad_x[:-k].addcmul_(kept, weight[:, width - 1 - k])
            read = torch.where(here, x[:-k], 0)
            grad_weight[:, width - 1 - k] = (kept * read).sum(0)
        return grad_x, grad_weight, None


def segment_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row: RowSegments,
    *,
    activation: str | None = None,
) -> Tensor:
    """Convolve each segment of a row alone, in float32 or better.

    Every shape follows from T, D and W, so this is the form of rows of fixed shape too.

    Args:
        x: (1, D, T).
        weight: (D, W), the last tap that of the slot itself.
        bias: (D,), or None.
        activation: None, "silu" or "swish" (the same).

    Returns:
        (1, D, T) in the dtype of `x`.

    Raises:
        CapabilityError: another activation.
        ValueError: a tensor that is not this row.
    """
    if activation not in ACTIVATIONS:
        raise CapabilityError(
            f"a short convolution with activation {activation!r} is not supported"
        )
    row.check(x.shape[2])
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps: Tensor = _Taps.apply(  # type: ignore[no-untyped-call]
        x.squeeze(0).transpose(0, 1).to(dtype), weight.to(dtype), row.offsets
    )
    if bias is not None:
        taps = taps + bias.to(dtype)
    if activation is not None:
        taps = silu(taps)
    return taps.to(x.dtype).transpose(0, 1)[None]
