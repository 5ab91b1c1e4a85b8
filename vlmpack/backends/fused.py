"""What runs norms, gated activations and rotations in one kernel each.

In eager mode an RMS norm is six kernels that each read and write a row. The activation of a gated
MLP is two, and the rotation of queries and keys ten. None is a product of matrices, so on a GPU
they cost what they read and write.

    rms_norm   `row_operators.py`: Triton's kernel on CUDA, the formula elsewhere
    rotation   the same
    gated      y = activation(gate) * up: liger's kernel, or torch.compile's of the formula

Models round a norm in two ways. Llama, Qwen2 and Qwen3 round the normed x to its own dtype before
they multiply by the weight. Gemma, Qwen3.5 and Nemotron-H round the product alone. The kernel has
both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from vlmpack.backends import row_operators
from vlmpack.errors import CapabilityError

FusedName = Literal["auto", "none", "liger", "compile"]
"""What can be asked for: `model.fused_layers` of a recipe."""

Activation = Literal["silu", "gelu_tanh"]
"""What a gated MLP applies to its gate: SiLU (SwiGLU), or GELU by its tanh form (GeGLU)."""

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}

Gated = Callable[[Tensor, Tensor, Activation], Tensor]
"""(gate, up, activation) -> their product."""

Norm = Callable[..., Tensor]
"""(x, weight, eps, form, dtype) -> the normed x: see `row_operators.rms_norm`."""

Rotate = Callable[..., Sequence[Tensor]]
"""(one or two tensors of heads, cos, sin, dtype) -> those rotated: see `row_operators.rotate`."""


@dataclass(frozen=True, slots=True)
class FusedOps:
    """The functions that run norms, gated activations and rotations.

    Args:
        gated: None where a model's own code runs.
    """

    name: str
    reason: str
    gated: Gated | None = None
    norm: Norm = row_operators.rms_norm
    rotate: Rotate = row_operators.rotate


_LIGER: dict[tuple[str, str], tuple[str, ...]] = {
    ("swiglu", "LigerSiLUMulFunction"): ("a", "b"),
    ("geglu", "LigerGELUMulFunction"): ("a", "b"),
}
"""liger's functions by module, and what each takes first."""


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


def why_no_kernels(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run here; None where they can."""
    if device.type != "cuda":
        return f"Triton's kernels need a CUDA device, this one is {device.type}"
    if find_spec("triton") is None:
        return "Triton, which torch's builds for CUDA bring, is not installed"
    return None


def why_no_liger() -> str | None:
    """Why liger's kernels cannot be taken though Triton's can run; None where they can."""
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


def liger_gated() -> Gated:
    """liger's kernels. Their backward pass writes over gate and up, which nothing else keeps."""
    functions = {
        "silu": _liger_function("swiglu", "LigerSiLUMulFunction"),
        "gelu_tanh": _liger_function("geglu", "LigerGELUMulFunction"),
    }

    def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        output: Tensor = functions[activation].apply(gate, up)
        return output

    return gated


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


def compiled_gated(backend: str = "inductor") -> Gated:
    """The formula, compiled by torch.compile.

    Only this function is compiled, not layers. So no attention, hook or gather breaks its graph,
    and rows of any width share one.
    """

    def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return _compiled(_plain_gated, backend)(gate, up, activation)

    return gated


def is_fused(requested: FusedName, device: torch.device) -> tuple[bool, bool]:
    """Whether `choose_fused` would choose anything for norms, and for gated activations, on a
    device that need not be here."""
    if requested != "auto":
        return (requested != "none",) * 2
    is_cuda = device.type == "cuda"
    return is_cuda, is_cuda and why_no_liger() is None


def choose_fused(requested: FusedName, device: torch.device) -> tuple[FusedOps | None, str]:
    """Choose what runs norms, activations and rotations on `device`, with the reason. None for the
    model's own.

    Raises:
        CapabilityError: what is asked for by name cannot run here.
    """
    said = "first choice" if requested == "auto" else "as the recipe asks"
    if requested == "none":
        return None, said
    if requested == "compile":
        return FusedOps("compile", said, compiled_gated()), said
    why = why_no_kernels(device)
    no_liger = why or why_no_liger()
    if requested == "liger" and no_liger is not None:
        raise CapabilityError(
            f"model.fused_layers: liger cannot run: {no_liger}; use auto, none or compile"
        )
    if why is not None:
        return None, why
    if no_liger is not None:
        return FusedOps("triton", f"{said}; no gated activations: {no_liger}"), said
    version = metadata.version("liger-kernel")
    return FusedOps("triton", f"{said}; gated activations: liger {version}", liger_gated()), said
