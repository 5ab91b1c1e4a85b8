"""A linear layer and its adapter as one function of autograd.

    y = x W^T + b + s (x A^T) B^T

Under autocast peft widens x to the adapter's float32, which autocast narrows again for A. It scales
and adds the update in passes of their own over the output. Here all of it is in the dtype of the
products, and each result is written by a product:

    forward    low = s x A^T                 y = low B^T + b,  then  += x W^T
    backward   dlow = s dy B                 dx = dlow A,      then  += dy W
               dA = dlow^T x,  dB = dy^T low

The wide product comes last, so that its sum is rounded once. Dropout keeps some numbers of the x
that A reads as they are, and s is divided by their share.

DoRA (2402.09353) has a factor m for each column, a trained magnitude over a length:

    y = m (x W^T + s (x A^T) B^T) + b

m B takes the place of B then, and one pass over the output multiplies by m in float32. Under
dropout peft adds (m - 1) of what W makes of the dropped x to the plain output.

peft's modules keep their parameters, names and files. `fuse_adapters` replaces their `forward`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from vlmpack.backends.adapter_folder import ADAPTER
from vlmpack.backends.hf.frozen import is_packed, unpacked


def fuse_adapters(model: nn.Module) -> None:
    """Replace the `forward` of every layer of peft's in a model. Adapters have no bias."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer) and not isinstance(module, _AdaptedLayer):
            changed: Any = module
            changed.__class__ = _derived(type(module))


@cache
def _derived(own: type) -> type:
    return type(f"Fused{own.__name__}", (_AdaptedLayer, own), {"__module__": own.__module__})


class _AdaptedLayer:
    """The `forward` of a layer of peft's."""

    base_layer: Any
    lora_A: Any  # noqa: N815  # peft's names
    lora_B: Any  # noqa: N815
    lora_dropout: Any
    lora_magnitude_vector: Any
    scaling: dict[str, float]
    disable_adapters: bool
    merged: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in) -> (..., out)."""
        base = self.base_layer
        is_plain = not (args or kwargs or self.disable_adapters or self.merged)
        # Without a gradient bitsandbytes has a kernel that multiplies by packed weights.
        reads_packed = is_packed(base.weight) and not torch.is_grad_enabled()
        if not is_plain or reads_packed or base.weight.requires_grad:
            own: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return own
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        dropout, vectors = self.lora_dropout[ADAPTER], self.lora_magnitude_vector
        function: Any = _AdaptedLinear
        output: Tensor = function.apply(
            x,
            self.lora_A[ADAPTER].weight,
            self.lora_B[ADAPTER].weight,
            vectors[ADAPTER].weight if ADAPTER in vectors else None,
            base,
            self.scaling[ADAPTER],
            dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0,
        )
        return output


class _AdaptedLinear(torch.autograd.Function):
    """The output of a frozen layer with an adapter, (..., out) in the dtype of x (..., in).

    A is (rank, in), B (out, rank) and the magnitude (out,), of any dtypes; the layer's weight is of
    one that its product takes, or in 4 bits. `dropout` is the share of x that A does not read.
    Inside, tensors of tokens are (T, ...).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        magnitude: Tensor | None,
        base: nn.Linear,
        scale: float,
        dropout: float,
    ) -> Tensor:
        dtype, stored, spread = x.dtype, unpacked(base.weight), b
        lengths, ratio, plain, kept = None, None, None, None
        if magnitude is not None:
            lengths = _lengths(stored, a, b, scale)
            ratio = magnitude / lengths
            spread = ratio[:, None] * b
        read = whole = x.reshape(-1, x.shape[-1])
        if dropout:
            kept = torch.native_dropout(x, dropout, True)[1].view(whole.shape)
            read, scale = whole * kept, scale / (1 - dropout)
        # Elsewhere the product refuses a weight in another dtype.
        casts = is_packed(base.weight) or torch.is_autocast_enabled(x.device.type)
        weight, down, up = stored.to(dtype) if casts else stored, a.to(dtype), spread.to(dtype)
        low = _scaled_product(read, down.t(), scale)
        bias = None if base.bias is None else base.bias.to(dtype)
        y = low @ up.t() if bias is None else torch.addmm(bias, low, up.t())
        if ratio is None or kept is not None:
            # `selective` recomputation keeps both products, which are one tensor.
            with _unsafe_preserve_version_counter(y):
                y = y.addmm_(whole, weight.t())
        if ratio is not None:
            ratio = ratio if kept is None else (ratio - 1) / (1 - dropout)
            plain = read @ weight.t()
            y = torch.addcmul(y, plain, ratio, out=torch.empty_like(y))
        ctx.packed = base.weight if is_packed(base.weight) else None
        ctx.shape, ctx.scale, ctx.share = x.shape, scale, 1 - dropout
        held = None if ctx.packed is not None else weight
        ctx.save_for_backward(a, b, read, low, down, up, held, kept, lengths, ratio, plain)
        # A view of what a function returns could not be changed in place.
        output: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, read, low, down, up, weight, kept, lengths, ratio, plain = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1])
        of_low = _scaled_product(g, up, ctx.scale)
        of_a, of_b, of_x, of_magnitude = of_low.t() @ read, g.t() @ low, None, None
        if ratio is not None:
            of_ratio = (of_b * b).sum(1) + (g.to(ratio.dtype) * plain).sum(0) / ctx.share
            of_magnitude = of_ratio / lengths
            of_b = (ratio if kept is None else ratio * ctx.share + 1)[:, None] * of_b
        if ctx.needs_input_grad[0]:
            weight = unpacked(ctx.packed).to(g.dtype) if weight is None else weight
            of_x = of_low @ down
            if ratio is not None:
                of_x.addmm_(torch.mul(g, ratio, out=torch.empty_like(g)), weight)
            if kept is not None:
                of_x *= kept
            if ratio is None or kept is not None:
                of_x.addmm_(g, weight)
            of_x = of_x.view(ctx.shape)
        return of_x, of_a.to(a.dtype), of_b.to(b.dtype), of_magnitude, None, None, None


def _scaled_product(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """scale x y, in one product."""
    return torch.addmm(x.new_empty(()), x, y, beta=0, alpha=scale)


def _lengths(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """(out,) lengths of the rows of W + s B A, which no gradient passes (2402.09353, 4.3)."""
    wide = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
    # A batch of one, since `selective` recomputation keeps what other products make.
    merged = weight.to(wide, copy=True)[None]
    merged.baddbmm_(b.to(wide)[None], a.to(wide)[None], alpha=scale)
    lengths: Tensor = torch.linalg.vector_norm(merged[0], dim=1)
    return lengths
