"""Operators of torch that a Triton kernel runs on CUDA, and a formula elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

_LIBRARY = torch.library.Library("vlmpack", "DEF")
OPERATORS: Any = torch.ops.vlmpack
"""Those that `define` has made, by their names."""

_plain = False  # a plain global, which a compiled layer reads without a break in its graph


def is_plain() -> bool:
    """Whether this is a forward pass through the plain path: see `plain_path`."""
    return _plain


@contextmanager
def plain_path() -> Iterator[None]:
    """Forward passes without what makes training fast: stock modules in place of fused ones, the
    loop over segments as attention, formulas in place of kernels, sums of products in float32.

    Layers are compiled and graphs are replayed in training mode alone, so a pass in eval mode has
    none of these either.
    """
    global _plain
    matmul: Any = torch.backends.cuda.matmul
    rounds = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before
        matmul.allow_bf16_reduced_precision_reduction = rounds


def define(schema: str, formula: Callable[..., Any], kernels: str, launch: str) -> None:
    """Make an operator.

    Args:
        schema: in torch's notation, with its name.
        kernels: the module that has `launch`. It imports Triton, which is there where CUDA is, so
            it is imported by the first launch.
        launch: a function of the formula's arguments.
    """

    name = _LIBRARY.define(schema)
    _LIBRARY.impl(name, formula, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, launched(formula, kernels, launch), "CUDA")


def launched(formula: Callable[..., Any], kernels: str, launch: str) -> Callable[..., Any]:
    """The operator on CUDA: the kernel on its first tensor's device. In float64, which kernels do
    not compute in, and on the plain path it is the formula. See `define`."""

    def run(*args: Any) -> Any:
        if is_plain():
            return formula(*args)
        device = -1
        for each in args:  # a call of every norm: no function of Python more than needed
            if isinstance(each, torch.Tensor):
                if each.dtype is torch.float64:
                    return formula(*args)
                device = each.get_device() if device < 0 else device
        # Triton launches on the current device, whatever its tensors are on.
        with torch.cuda.device(device):
            return getattr(import_module(kernels), launch)(*args)

    return run
