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


class LigerRMSNormFunction(torch.autograd.Function):
    """It keeps its input, the weight, and one float32 a row."""

    @staticmethod
    def forward(
        ctx,
        X,  # noqa: N803
        W,  # noqa: N803
        eps,
        offset=0.0,
        casting_mode="llama",
        in_place=True,
        row_mode=None,
    ):
        _require_device(X, W)
        assert X.shape[-1] == W.shape[0] and casting_mode in ("llama", "gemma")
        X = X.contiguous()
        wide = X.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = wide * rstd
        if casting_mode == "llama":
            out = normed.to(X.dtype) * (offset + W)
        else:
            out = normed * (offset + W.float())
        ctx.save_for_backward(X, W, rstd)
        ctx.options = (offset, casting_mode, in_place)
        return out.to(X.dtype)

    @staticmethod
    def backward(ctx, dY):  # noqa: N803
        X, W, rstd = ctx.saved_tensors
        offset, casting_mode, in_place = ctx.options
        dY = dY.contiguous()
        scaled = (dY.float() * (offset + W.float())) * rstd
        normed = X.float() * rstd
        dX = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)).to(dY.dtype)
        dW = None
        if ctx.needs_input_grad[1]:
            low = normed.to(X.dtype) if casting_mode == "llama" else normed
            dW = (dY.float() * low.float()).flatten(0, -2).sum(0).to(W.dtype)
        if in_place:
            _write(dY, dX)
            dX = dY
        return dX, dW, None, None, None, None, None


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


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int | None, sign: int) -> Any:
    """Over what it got where that lies token by token, else over a copy."""
    _require_device(q, k, cos, sin)
    assert cos.ndim == 3, "others are reshaped"
    cos, sin = cos.contiguous(), sin.contiguous()
    width = min(cos.shape[-1], q.shape[-1]) if width is None else width
    assert width % 2 == 0 and 0 < width <= q.shape[-1] and cos.shape[1] == q.shape[2]
    # Half of the angles, whatever the other half is.
    cosines, sines = (part[:, :, None, : width // 2] for part in (cos, sign * sin))
    out = []
    for x in (q, k):
        rows = x.transpose(1, 2).contiguous()
        first, second, rest = rows.split((width // 2, width // 2, rows.shape[-1] - width), dim=-1)
        first, second = first.to(sin.dtype), second.to(sin.dtype)
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        _write(rows, torch.cat((*(part.to(rows.dtype) for part in turned), rest), dim=-1))
        out.append(rows.transpose(1, 2))
    return *out, cos, sin


def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return _turned(q, k, cos, sin, rotary_dim, 1)


def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return _turned(dq, dk, cos, sin, rotary_dim, -1)[:2]


MODULES: dict[str, dict[str, Any]] = {
    "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": LigerRMSNormFunction},
    "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": LigerSiLUMulFunction},
    "liger_kernel.ops.geglu": {"LigerGELUMulFunction": LigerGELUMulFunction},
    "liger_kernel.ops.rope": {"rope_forward": rope_forward, "rope_backward": rope_backward},
}
"""By module, what it has."""
