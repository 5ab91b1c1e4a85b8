"""Products whose width is no multiple of 8, computed at the next one.

A GPU's products want rows that begin at multiples of 16 bytes: 8 numbers in bf16. Qwen2.5-VL's
tower is 3,420 wide, and a product of that width takes about 1.6 times as long as one of 3,424.
Zeros are added where weights are narrowed for a product, so parameters, files and checkpoints keep
their shapes. In a gated MLP

    y = W_d (f(W_g x + b_g) * (W_u x + b_u)) + b_d

f is SiLU or GELU, and f(0) = 0. So added rows of W_g and W_u make columns of zeros, which added
columns of W_d multiply. No term of a sum changes, and no gradient. Added rows of a head make logits
that no loss reads (`cross_entropy.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vlmpack.backends.linear_layers import Operands, has_hooks, operands, products

MULTIPLE = 8
"""Numbers of 2 bytes in 16."""


def is_uneven(size: int, dtype: torch.dtype) -> bool:
    """Whether a product gains by `evened`: its numbers take 2 bytes, and no multiple of 16 bytes
    holds a row of them."""
    return dtype.itemsize == 2 and size % MULTIPLE > 0


class _Evened(torch.autograd.Function):
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


def evened(own: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A parameter in the dtype of products, its size along `dim` raised to a multiple of 8 by
    zeros."""
    made: Tensor = _Evened.apply(own, dim, dtype)  # type: ignore[no-untyped-call]
    return made


def is_uneven_mlp(mlp: Any, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether an MLP gains by `even_mlp`: it runs on a GPU, its layers are plain ones with no hook
    to run, and its width is uneven in the dtype of products."""
    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    plain = all(type(layer) is nn.Linear for layer in layers)
    if not x.is_cuda or not plain or has_hooks(*layers):
        return False
    return is_uneven(mlp.gate_proj.weight.shape[0], dtype)


def even_mlp(
    mlp: Any, x: Tensor, dtype: torch.dtype, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The output of a gated MLP for (..., D) x.

    Args:
        mlp: with gate_proj and up_proj from D to F, and down_proj from F to D.
        dtype: of products.
        product: f(gate) * up of two (..., F) tensors, with f(0) = 0.
    """

    def even(own: nn.Linear) -> Operands:
        weight, bias = operands(own)
        bias = None if bias is None else evened(bias, 0, dtype)
        return Operands(evened(weight, 0, dtype), bias)

    both = product(*products([even(mlp.gate_proj), even(mlp.up_proj)], x.to(dtype)))
    weight, bias = operands(mlp.down_proj)
    return linear(both, evened(weight, 1, dtype), bias)
