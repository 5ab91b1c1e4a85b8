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

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from vlmpack.backends.adapter_folder import ADAPTER
from vlmpack.backends.hf.frozen import is_packed, unpacked
from vlmpack.backends.linear_layers import (
    GROUP,
    GROUPS,
    ProductGroup,
    has_hooks,
    operands,
    state_of,
)
from vlmpack.kernel_operators import is_plain


def fuse_adapters(model: nn.Module) -> None:
    """Replace the `forward` of every layer of peft's in a model, but that of experts."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    for module in model.modules():
        if isinstance(module, ParamWrapper):
            continue
        if isinstance(module, LoraLayer) and not isinstance(module, _AdaptedLayer):
            changed: Any = module
            changed.__class__ = _derived(type(module))
    for parent in model.modules():
        for names in GROUPS:
            children = (getattr(parent, name, None) for name in names)
            layers = [child for child in children if isinstance(child, _AdaptedLayer)]
            layers = [layer for layer in layers if layer.in_features == layers[0].in_features]
            if len(layers) > 1 and GROUP not in vars(layers[-1]):
                ProductGroup(parent, layers, _AdaptedLayer._parts, _outputs)


@cache
def _derived(own: type) -> type:
    return type(f"Fused{own.__name__}", (_AdaptedLayer, own), {"__module__": own.__module__})


class _Parts(NamedTuple):
    """What the function reads of a layer: its own weight is in `base`, and `dropout` is the share
    of its input that A does not read."""

    base: nn.Linear
    adapter: tuple[Tensor, Tensor, Tensor | None]
    scale: float
    dropout: float

    def state(self, x: Tensor) -> tuple[Any, ...]:
        """What an output for x depends on, beside which tensors those are."""
        return state_of(x, self.base.weight, self.base.bias, *self.adapter)

    def joins(self, first: _Parts) -> bool:
        """Whether it can be computed with the first of a group."""
        return self.scale == first.scale and not self.dropout


class _AdaptedLayer:
    """The `forward` of a layer of peft's, which remains where it computes something else."""

    base_layer: Any
    lora_A: Any  # noqa: N815  # peft's names
    lora_B: Any  # noqa: N815
    lora_dropout: Any
    lora_magnitude_vector: Any
    lora_variant: dict[str, Any]
    scaling: dict[str, float]
    active_adapter: str | list[str]
    disable_adapters: bool
    merged: bool
    in_features: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in) -> (..., out)."""
        group: ProductGroup | None = vars(self).get(GROUP)
        if group is not None and not (args or kwargs):
            output = group.take(self, x)
            if output is not None:
                return output
        parts = None if args or kwargs or is_plain() else self._parts()
        if parts is not None and torch.compiler.is_compiling():
            return _traced(parts, x)
        if parts is None:
            own: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return own
        # Tensors of inference mode do not say whether they were changed.
        if group is None or not group.is_first or parts.dropout or x.is_inference():
            return _outputs([parts], x)[0]
        return group.compute(self, parts, x)

    def _parts(self) -> _Parts | None:
        """None where peft's own forward computes something else than the function."""
        active = ADAPTER in self.scaling and self.active_adapter in (ADAPTER, [ADAPTER])
        if self.disable_adapters or self.merged or not active:
            return None
        base, vectors = self.base_layer, self.lora_magnitude_vector
        weight, bias = base.weight, base.bias
        # Without a gradient bitsandbytes has a kernel that multiplies by packed weights.
        reads_packed = is_packed(base) and not torch.is_grad_enabled()
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        a, b, drop = self.lora_A[ADAPTER], self.lora_B[ADAPTER], self.lora_dropout[ADAPTER]
        dora = ADAPTER in vectors
        # DoRA is one of peft's variants. The formulas of the others are not here.
        other = (ADAPTER in self.lora_variant) != dora
        inner = (base, a, b, drop, vectors[ADAPTER]) if dora else (base, a, b, drop)
        (down, _), (up, up_bias) = operands(a), operands(b)
        if reads_packed or trained or other or up_bias is not None or has_hooks(*inner):
            return None
        share = drop.p if drop.training and isinstance(drop, nn.Dropout) else 0.0
        magnitude = vectors[ADAPTER].weight if dora else None
        return _Parts(base, (down, up, magnitude), self.scaling[ADAPTER], share)


def _outputs(parts: Sequence[_Parts], x: Tensor) -> tuple[Tensor, ...]:
    """The outputs of layers of one scale for (..., in) x. Only one alone may have dropout."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    function: Any = _AdaptedLinears
    outputs: tuple[Tensor, ...] = function.apply(
        x,
        [one.base for one in parts],
        parts[0].scale,
        parts[0].dropout,
        *(tensor for one in parts for tensor in one.adapter),
    )
    return outputs


def _traced(one: _Parts, x: Tensor) -> Tensor:
    """The output in torch's own operators, which a compiler differentiates and fuses itself."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    (down, up, _), rows = one.adapter, x.reshape(-1, x.shape[-1])
    low, up = _scaled_product(rows, down.to(x.dtype).t(), one.scale), up.to(x.dtype).t()
    bias = one.base.bias
    y = low @ up if bias is None else torch.addmm(bias.to(x.dtype), low, up)
    y = torch.addmm(y, rows, one.base.weight.to(x.dtype).t())
    return y.view(*x.shape[:-1], -1)


class _AdaptedLinears(torch.autograd.Function):
    """The outputs of frozen layers with adapters that read one x, (..., out) each in its dtype.

    A is (rank, in), B (out, rank) and the magnitude (out,), of any dtypes; a layer's weight is of
    one that its product takes, or packed. `dropout` is the share of x that A does not read, of
    one layer alone. Inside, tensors of tokens are (T, ...), and those of A are those of all layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bases: Sequence[nn.Linear],
        scale: float,
        dropout: float,
        *adapters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        # A layer whose output nobody reads has no gradient, as where it was never called.
        ctx.set_materialize_grads(False)
        read = whole = x.reshape(-1, x.shape[-1])
        kept, lengths_scale = None, scale
        if dropout:
            kept = torch.native_dropout(x, dropout, True)[1].view(whole.shape)
            read, scale = whole * kept, scale / (1 - dropout)
        parts: Any = list(zip(*(iter(adapters),) * 3, strict=True))
        down = _joined([a for a, _, _ in parts], 0).to(x.dtype)
        low = _scaled_product(read, down.t(), scale)
        ctx.shape, ctx.scale, ctx.dropout, ctx.bases = x.shape, scale, dropout, bases
        outputs, saved = [], [read, low, down, kept]
        lows = low.split([len(a) for a, _, _ in parts], dim=1)
        for base, low_of_one, (a, b, magnitude) in zip(bases, lows, parts, strict=True):
            weight, spread = unpacked(base), b
            lengths, ratio, plain = None, None, None
            if magnitude is not None:
                lengths = _lengths(weight, a, b, lengths_scale)
                ratio = magnitude / lengths
                spread = ratio[:, None] * b
            # Elsewhere the product refuses a weight in another dtype.
            if is_packed(base) or torch.is_autocast_enabled(x.device.type):
                weight = weight.to(x.dtype)
            up = spread.to(x.dtype)
            bias = None if base.bias is None else base.bias.to(x.dtype)
            y = low_of_one @ up.t() if bias is None else torch.addmm(bias, low_of_one, up.t())
            if ratio is None or dropout:
                # `selective` recomputation keeps both products, which are one tensor.
                with _unsafe_preserve_version_counter(y):
                    y = y.addmm_(whole, weight.t())
            if ratio is not None:
                ratio = (ratio - 1) / (1 - dropout) if dropout else ratio
                plain = read @ weight.t()
                y = torch.addcmul(y, plain, ratio, out=torch.empty_like(y))
            held = None if is_packed(base) else weight
            saved += [a, b, up, held, lengths, ratio, plain]
            # A view of what a function returns could not be changed in place.
            outputs.append(torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1])))
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        read, low, down, kept, *saved = ctx.saved_tensors
        parts = list(zip(*(iter(saved),) * 7, strict=True))
        gs = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        of_lows = [
            low.new_zeros(len(low), len(a)) if g is None else _scaled_product(g, up, ctx.scale)
            for g, (a, _, up, *_) in zip(gs, parts, strict=True)
        ]
        of_low = _joined(of_lows, 1)
        sizes = [len(a) for a, *_ in parts]
        of_x = of_low @ down if ctx.needs_input_grad[0] else None
        gradients: list[Tensor | None] = []
        of_as, lows = (of_low.t() @ read).split(sizes), low.split(sizes, dim=1)
        for g, base, of_a, low_of_one, part in zip(gs, ctx.bases, of_as, lows, parts, strict=True):
            if g is None:
                gradients += [None] * 3
                continue
            a, b, _, weight, lengths, ratio, plain = part
            of_b, of_magnitude = g.t() @ low_of_one, None
            if of_x is not None and weight is None:
                weight = unpacked(base).to(g.dtype)
            if ratio is not None:
                share = 1 - ctx.dropout
                of_ratio = (of_b * b).sum(1) + (g.to(ratio.dtype) * plain).sum(0) / share
                of_magnitude = of_ratio / lengths
                of_b = (ratio * share + 1 if ctx.dropout else ratio)[:, None] * of_b
                if of_x is not None:
                    of_x.addmm_(torch.mul(g, ratio, out=torch.empty_like(g)), weight)
            if of_x is not None and ctx.dropout:
                of_x *= kept
            if of_x is not None and (ratio is None or ctx.dropout):
                of_x.addmm_(g, weight)
            gradients += [of_a.to(a.dtype), of_b.to(b.dtype), of_magnitude]
        of_x = None if of_x is None else of_x.view(ctx.shape)
        return of_x, None, None, None, *gradients


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


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
