"""Norms, gated activations and rotations in one kernel each: liger's, or torch.compile's of ours.

In eager mode an RMS norm is six kernels that each read and write a row. The activation of a gated
MLP is two, and the rotation of queries and keys ten. None is a product of matrices, so on a GPU
they cost what they read and write.

    rms_norm      y = (offset + weight) * x / rms(x), the mean of squares in float32 (1910.07467)
    gated         y = activation(gate) * up
    rotation      y = x * cos + rotate_half(x) * sin, rotate_half([a, b]) = [-b, a] (2104.09864)

Models round in two ways. Llama, Qwen2 and Qwen3 round the normed x to its own dtype before they
multiply by the weight. Gemma, Qwen3.5 and Nemotron-H round the product alone. liger has both.
torch.compile keeps the product in float32 either way, which rounds once less.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from vlmpack.errors import CapabilityError

FusedName = Literal["auto", "none", "liger", "compile"]
"""What can be asked for: `model.fused_layers` of a recipe."""

Activation = Literal["silu", "gelu_tanh"]
"""What a gated MLP applies to its gate: SiLU (SwiGLU), or GELU by its tanh form (GeGLU)."""

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class NormForm:
    """The form of an RMS norm.

    Args:
        offset: added to the weight: 1 where weights are kept as differences from 1.
        rounds_first: whether the normed x is rounded to its dtype before the weight.
    """

    offset: float
    rounds_first: bool

    def eager(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(..., D) -> (..., D): the formula itself."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if self.rounds_first:
            return weight * wide.to(x.dtype)
        return ((self.offset + weight.float()) * wide).to(x.dtype)


FORMS = (NormForm(0.0, True), NormForm(0.0, False), NormForm(1.0, False))
"""Those that are in use, and that liger rounds as the models do: with an offset and rounding first
it would keep the sum of offset and weight in float32."""


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
    wide = x[..., :width].to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    turned = wide * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


Rotate = Callable[[Sequence[Tensor], Tensor, Tensor], Sequence[Tensor]]
"""(one or two tensors of (B, T, H, D), cos, sin) -> `rotated` of each. The second half of cos and
of sin repeats the first."""


@dataclass(frozen=True, slots=True)
class FusedOps:
    """The functions that run norms, gated activations and rotations.

    Args:
        norm: (x, weight, eps, form) -> the normed x, in the dtype of x.
        gated: (gate, up, activation) -> their product.
        rotate: see `Rotate`; None where the installed version cannot.
    """

    name: str
    reason: str
    norm: Callable[[Tensor, Tensor, float, NormForm], Tensor]
    gated: Callable[[Tensor, Tensor, Activation], Tensor]
    rotate: Rotate | None


_LIGER: dict[tuple[str, str], tuple[str, ...]] = {
    ("rms_norm", "LigerRMSNormFunction"): ("X", "W", "eps", "offset", "casting_mode", "in_place"),
    ("swiglu", "LigerSiLUMulFunction"): ("a", "b"),
    ("geglu", "LigerGELUMulFunction"): ("a", "b"),
}
"""liger's functions by module, and what each takes first."""

_LIGER_ROTATIONS = {
    ("rope", "rope_forward"): ("q", "k", "cos", "sin"),
    ("rope", "rope_backward"): ("dq", "dk", "cos", "sin"),
}
"""The same of its rotation."""


def _liger_function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def _liger_takes(module: str, name: str) -> list[str] | str:
    """The arguments of a function of liger, or why it cannot be imported."""
    try:
        function: Any = _liger_function(module, name)
    except (ImportError, AttributeError, OSError) as error:
        return f"liger_kernel.ops.{module}.{name} cannot be imported ({error})"
    forward = getattr(function, "forward", None)  # of autograd, whose first argument is the context
    taken = [*signature(forward or function).parameters]
    return taken[1:] if forward else taken


def why_no_liger(device: torch.device) -> str | None:
    """Why liger's kernels cannot run here; None where they can."""
    if device.type != "cuda":
        return f"liger's kernels need a CUDA device, this one is {device.type}"
    for (module, name), expected in _LIGER.items():
        taken = _liger_takes(module, name)
        if isinstance(taken, str):
            return f"{taken}; pip install liger-kernel"
        if tuple(taken[: len(expected)]) != expected:
            return (
                f"{name} of the installed liger-kernel takes {', '.join(taken)} where "
                f"{', '.join(expected)} are expected"
            )
    return None


def why_no_liger_rotation() -> str | None:
    """Why liger's rotation cannot be taken though its other kernels can; None if it can.

    Without `rotary_dim` its kernel takes every head to be rotated whole. For others it reads beyond
    cos.
    """
    for (module, name), expected in _LIGER_ROTATIONS.items():
        taken = _liger_takes(module, name)
        if isinstance(taken, str):
            return taken
        if tuple(taken[: len(expected)]) != expected or "rotary_dim" not in taken:
            return f"its {name} takes no rotary_dim, as that of liger-kernel 0.8.5 does"
    return None


def liger_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """liger's kernel, not in place. In place, its backward pass would write into a gradient that
    the residual stream may read too."""
    casting = "llama" if form.rounds_first else "gemma"
    function = _liger_function("rms_norm", "LigerRMSNormFunction")
    output: Tensor = function.apply(x, weight, eps, form.offset, casting, False)
    return output


def liger_gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """liger's kernel. Its backward pass writes over gate and up, which nothing else keeps."""
    module, name = {
        "silu": ("swiglu", "LigerSiLUMulFunction"),
        "gelu_tanh": ("geglu", "LigerGELUMulFunction"),
    }[activation]
    output: Tensor = _liger_function(module, name).apply(gate, up)
    return output


class _LigerRotation(torch.autograd.Function):
    """liger's kernel on copies, in both directions.

    The kernel writes where it reads, and torch does not notice. The overwritten tensor may be read
    again. A layer that recomputes all but its products gets the queries of its forward pass and
    would rotate them twice. A gradient may also belong to another operator.
    """

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _turned("rope_forward", tensors, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return None, None, *_turned("rope_backward", grads, *ctx.saved_tensors)


def _turned(name: str, tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    copies = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
    if len(copies) == 1:  # the kernel takes two: a head that nobody reads
        copies.append(copies[0].new_empty((*copies[0].shape[:2], 1, copies[0].shape[-1])))
    heads_first = [x.transpose(1, 2) for x in copies]
    turned = _liger_function("rope", name)(*heads_first, cos, sin, rotary_dim=cos.shape[-1])
    return tuple(x.transpose(1, 2) for x in turned[: len(tensors)])


def liger_rotate(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
    """liger's kernel, which computes in the dtype of cos."""
    out: tuple[Tensor, ...] = _LigerRotation.apply(cos, sin, *tensors)  # type: ignore[no-untyped-call]
    return out


VARIANTS = 64
"""A process may compile so many of one formula: each rank, dtype and form is one, with gradients
and without. Torch allows 8, and ends the run at the ninth."""


@cache
def _compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    # As an argument: torch's configuration is each thread's own, and layers that are computed again
    # run in autograd's. Older versions have no such argument.
    known = "recompile_limit" in signature(torch.compile).parameters
    limit: dict[str, Any] = {"recompile_limit": VARIANTS} if known else {}
    compiled: Callable[..., Tensor] = torch.compile(
        function, dynamic=True, fullgraph=True, backend=backend, **limit
    )
    return compiled


def _plain_gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return ACTIVATIONS[activation](gate) * up


def compiled_ops(reason: str = "as the recipe asks", *, backend: str = "inductor") -> FusedOps:
    """The formulas, compiled by torch.compile.

    Only these functions are compiled, not layers. So no attention, hook or gather breaks their
    graphs, and rows of any width share one.
    """

    def norm(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        return _compiled(form.eager, backend)(x, weight, eps)

    def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return _compiled(_plain_gated, backend)(gate, up, activation)

    def rotate(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        return [_compiled(rotated, backend)(x, cos, sin) for x in tensors]

    return FusedOps("compile", reason, norm, gated, rotate)


def liger_ops(reason: str) -> FusedOps:
    """liger's kernels, as far as the installed version has them."""
    why = why_no_liger_rotation()
    if why is not None:
        return FusedOps("liger", f"{reason}; no rotations: {why}", liger_norm, liger_gated, None)
    return FusedOps("liger", reason, liger_norm, liger_gated, liger_rotate)


def is_fused(requested: FusedName, device: torch.device) -> bool:
    """Whether `choose_fused` would choose anything, on a device that need not be here."""
    return why_no_liger(device) is None if requested == "auto" else requested != "none"


def choose_fused(requested: FusedName, device: torch.device) -> tuple[FusedOps | None, str]:
    """Choose what runs norms, activations and rotations on `device`, with the reason. None for the
    model's own.

    Raises:
        CapabilityError: what is asked for by name cannot run here.
    """
    if requested == "none":
        return None, "as the recipe asks"
    if requested == "compile":
        return compiled_ops(), "as the recipe asks"
    why = why_no_liger(device)
    if why is None:
        version = metadata.version("liger-kernel")
        said = "as the recipe asks" if requested == "liger" else "first choice"
        return liger_ops(f"{version}, {said}"), said
    if requested == "liger":
        raise CapabilityError(
            f"model.fused_layers: liger cannot run: {why}; use auto, none or compile"
        )
    return None, why
