"""RMS norms and rotations of heads, each as one operator of torch with a gradient of its own.

    vlmpack::rms_norm            x, weight -> the normed x, and 1 / rms of each row
    vlmpack::rms_norm_backward   its gradient -> those of x and of the weight
    vlmpack::rotate              queries, keys, cos, sin -> both rotated; back with `sign` -1

On CUDA an operator is a Triton kernel (`row_kernels.py`), and elsewhere the formula, which is what
these functions compute. Whatever looks at operators (torch.compile, recomputation, a recorder) sees
one with its real arguments.

    rms_norm   y = (offset + weight) * x / rms(x), the mean of squares in float32 (1910.07467)
    rotate     y = x * cos + rotate_half(x) * sin, rotate_half([a, b]) = [-b, a] (2104.09864)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlmpack.kernel_operators import OPERATORS, define

WIDEST = 8192
"""Columns of a row that a norm's kernel takes. One of 16,384 would not fit a GPU's registers."""


@dataclass(frozen=True, slots=True)
class NormForm:
    """The form of an RMS norm.

    Args:
        offset: added to the weight: 1 where weights are kept as differences from 1.
        rounds_first: whether the normed x is rounded to its dtype before the weight.
    """

    offset: float
    rounds_first: bool

    def dtype(self, x: Tensor, weight: Tensor) -> torch.dtype:
        """The dtype of what a model's own norm of this form makes."""
        return torch.promote_types(x.dtype, weight.dtype) if self.rounds_first else x.dtype

    def eager(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(..., D) -> (..., D): the formula itself."""
        dtype = self.dtype(x, weight)
        return norm_formula(x, weight, eps, self.offset, self.rounds_first, dtype)[0]


FORMS = (NormForm(0.0, True), NormForm(0.0, False), NormForm(1.0, False))
"""Those that are in use."""


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm_formula(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The normed x.

    Args:
        x: (..., D).
        weight: (D,).
        rounds_first: see `NormForm`.
        dtype: of the result, rounded once more after the weight where it is narrower.

    Returns:
        (..., D), and (...) 1 / rms in float32 or wider.
    """
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    if rounds_first:
        made = weight * normed.to(x.dtype)
    else:
        made = (offset + weight.to(wide.dtype)) * normed
    return made.to(dtype), scale.squeeze(-1)


def norm_backward_formula(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offset: float,
    rounds_first: bool,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; the second has no numbers unless the weight `learns`."""
    scale = scales[..., None]
    normed, given = x * scale, grad.to(scale.dtype)
    slope = given * (offset + weight.to(scale.dtype))
    x_grad = scale * (slope - normed * (slope * normed).mean(-1, keepdim=True))
    if not learns:
        return x_grad.to(x.dtype), weight.new_empty(0)
    if rounds_first:
        normed = normed.to(x.dtype)
    return x_grad.to(x.dtype), (given * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The formula itself: heads rotated in float32 or wider, rounded once.

    Args:
        x: (B, T, H, D).
        cos: (B, T, R) or (1, T, R), R <= D: columns of a head from R on stay as they are.
        sin: the same.

    Returns:
        (B, T, H, D) in the dtype of x.
    """
    width = cos.shape[-1]
    wide = _wide(x[..., :width])
    first, second = wide.chunk(2, dim=-1)
    turned = wide * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


def rotation_formula(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    sign: float,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by `sign` times the angles, in these dtypes. See `rotated`."""
    sin = sign * sin
    heads = ((q, q_dtype), (k, k_dtype))
    turned = [rotated(_wide(x), cos, sin).to(dtype).contiguous() for x, dtype in heads]
    return turned[0], turned[1]


_NORM = "float offset, bool rounds_first"
define(
    f"rms_norm(Tensor x, Tensor weight, float eps, {_NORM}, ScalarType dtype) -> (Tensor, Tensor)",
    norm_formula,
    "vlmpack.backends.row_kernels",
    "launch_norm",
)
define(
    f"rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scales, {_NORM}, "
    "bool learns) -> (Tensor, Tensor)",
    norm_backward_formula,
    "vlmpack.backends.row_kernels",
    "launch_norm_backward",
)
define(
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, float sign, ScalarType q_dtype, "
    "ScalarType k_dtype) -> (Tensor, Tensor)",
    rotation_formula,
    "vlmpack.backends.row_kernels",
    "launch_rotation",
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, form: NormForm, dtype: torch.dtype
    ) -> Tensor:
        ctx.form = form.offset, form.rounds_first
        out: Tensor
        out, scales = OPERATORS.rms_norm(x, weight, eps, *ctx.form, dtype)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        learns = ctx.needs_input_grad[1]
        found = OPERATORS.rms_norm_backward(grads[0], *ctx.saved_tensors, *ctx.form, learns)
        return found[0], found[1] if learns else None, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, form: NormForm, dtype: torch.dtype | None = None
) -> Tensor:
    """(..., D), (D,) -> (..., D) in `dtype`, or in that of a model's own norm."""
    made: Tensor = _Norm.apply(x, weight, eps, form, dtype or form.dtype(x, weight))  # type: ignore[no-untyped-call]
    return made


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, so cos and sin are all that is kept."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtypes: Sequence[torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = q.dtype, k.dtype
        turned: tuple[Tensor, Tensor] = OPERATORS.rotate(q, k, cos, sin, 1.0, *dtypes)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return *OPERATORS.rotate(*grads, cos, sin, -1.0, *ctx.dtypes), None, None, None


def rotate(
    tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None
) -> Sequence[Tensor]:
    """`rotated` of one or two tensors of heads, as one operator.

    Args:
        tensors: (B, T, H, D) each, alike but for H.
        cos: (B, T, R) or (1, T, R), its second half as its first.
        sin: the same.
        dtype: of the results; None for those of the tensors.
    """
    first, *more = tensors
    second = more[0] if more else first.new_empty((*first.shape[:2], 0, first.shape[-1]))
    dtypes = [dtype or x.dtype for x in (first, second)]
    turned: tuple[Tensor, ...] = _Rotation.apply(first, second, cos, sin, dtypes)  # type: ignore[no-untyped-call]
    return turned[: len(tensors)]
