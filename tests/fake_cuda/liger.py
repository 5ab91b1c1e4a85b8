"""liger-kernel 0.8.5 for the fake GPU: its functions by their published signatures, which keep what
theirs keep for the backward pass, round where theirs round, and write over what theirs write over.

As with a Triton kernel, torch does not see that anything was written. While a fake GPU is open they
refuse tensors of the CPU; else they take them.
"""

from __future__ import annotations

from typing import Any

import torch
from fake_cuda.device import FakeCudaTensor, is_open
from torch import Tensor
from torch.nn.functional import gelu, silu

VERSION = "0.8.5"


def _require_device(*tensors: Tensor) -> None:
    if is_open() and not all(isinstance(x, FakeCudaTensor) for x in tensors):
        raise RuntimeError("a kernel got a tensor of the CPU")


def _write(target: Tensor, value: Tensor) -> None:
    """Over the numbers, unseen."""
    if isinstance(target, FakeCudaTensor):
        target.held.copy_(value.held)
    else:
        target.data.copy_(value)


class _Gated(torch.autograd.Function):
    """They keep gate and up, and write the gradients there."""

    @staticmethod
    def run(ctx, a, b, activation):
        _require_device(a, b)
        assert a.dtype == b.dtype
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return activation(a.float()).to(b.dtype) * b

    @staticmethod
    def gradients(ctx, dc, activation):
        a, b = ctx.saved_tensors
        dc = dc.contiguous()
        with torch.enable_grad():
            leaf = a.float().detach().requires_grad_()
            acted = activation(leaf)
            (slope,) = torch.autograd.grad(acted, leaf, torch.ones_like(acted))
        da, db = (dc.float() * slope * b.float()).to(a.dtype), (dc * acted.detach()).to(b.dtype)
        _write(a, da)
        _write(b, db)
        return a, b


class LigerSiLUMulFunction(_Gated):
    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        assert gate_multiplier == down_multiplier == 1
        return _Gated.run(ctx, a, b, silu)

    @staticmethod
    def backward(ctx, dc):
        return *_Gated.gradients(ctx, dc, silu), None, None


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


class LigerGELUMulFunction(_Gated):
    @staticmethod
    def forward(ctx, a, b):
        return _Gated.run(ctx, a, b, _gelu_tanh)

    @staticmethod
    def backward(ctx, dc):
        return _Gated.gradients(ctx, dc, _gelu_tanh)


MODULES: dict[str, dict[str, Any]] = {
    "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": LigerSiLUMulFunction},
    "liger_kernel.ops.geglu": {"LigerGELUMulFunction": LigerGELUMulFunction},
}
"""By module, what it has."""
