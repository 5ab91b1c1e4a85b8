"""Gated MLPs whose width is no multiple of 8, computed at the next one.

A GPU's bf16 products want rows that begin at multiples of 16 bytes. Qwen2.5-VL's tower is 3,420
wide, and a product of that width takes about 1.6 times as long as one of 3,424. Zeros are added
where weights are narrowed for a product, so parameters, files and checkpoints keep their shapes:

    y = W_d (f(W_g x + b_g) * (W_u x + b_u)) + b_d

f is SiLU or GELU, and f(0) = 0. So added rows of W_g and W_u make columns of zeros, which added
columns of W_d multiply. No term of a sum changes, and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vlmpack.backends.hf.fused_rotation import autocast_dtype

MULTIPLE = 8
"""Numbers of 2 bytes in 16."""


class _Widened(torch.autograd.Function):
    """A tensor with zeros behind its last row or column, in another dtype, written once."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        ctx.dim, ctx.size, ctx.dtype = dim, own.shape[dim], own.dtype
        shape = [*own.shape]
        shape[dim] += -ctx.size % MULTIPLE
        made = own.new_empty(shape, dtype=dtype)
        made.narrow(dim, 0, ctx.size).copy_(own)
        made.narrow(dim, ctx.size, shape[dim] - ctx.size).zero_()
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return grads[0].narrow(ctx.dim, 0, ctx.size).to(ctx.dtype), None, None


def widened(own: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A parameter in the dtype of products, its size along `dim` raised to a multiple of 8 by
    zeros."""
    made: Tensor = _Widened.apply(own, dim, dtype)  # type: ignore[no-untyped-call]
    return made


def is_uneven(mlp: Any, x: Tensor) -> bool:
    """Whether an MLP gains by `even_mlp`: its products take 2 bytes a number on a GPU, its layers
    are plain ones, and its width is no multiple of 8."""
    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if not x.is_cuda or any(type(layer) is not nn.Linear for layer in layers):
        return False
    is_narrow = (autocast_dtype(x) or x.dtype).itemsize == 2
    return is_narrow and bool(mlp.gate_proj.weight.shape[0] % MULTIPLE)


def even_mlp(mlp: Any, x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The output of a gated MLP for (..., D) x, in the dtype of products.

    Args:
        mlp: with gate_proj and up_proj from D to F, and down_proj from F to D.
        product: f(gate) * up of two (..., F) tensors, with f(0) = 0.
    """
    dtype = autocast_dtype(x) or x.dtype

    def layer(own: nn.Linear) -> Tensor:
        bias = None if own.bias is None else widened(own.bias, 0, dtype)
        return linear(x, widened(own.weight, 0, dtype), bias)

    both = product(layer(mlp.gate_proj), layer(mlp.up_proj))
    return linear(both, widened(mlp.down_proj.weight, 1, dtype), mlp.down_proj.bias)
