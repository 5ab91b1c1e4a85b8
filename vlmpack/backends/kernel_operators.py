"""Operators of torch that a Triton kernel runs on CUDA, and a formula elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_LIBRARY = torch.library.Library("vlmpack", "DEF")
OPERATORS: Any = torch.ops.vlmpack
"""Those that `define` has made, by their names."""


def define(schema: str, formula: Callable[..., Any], kernels: str, launch: str) -> None:
    """Make an operator.

    Args:
        schema: in torch's notation, with its name.
        kernels: the module of `vlmpack.backends` that has `launch`. It imports Triton, which is
            there where CUDA is, so it is imported by the first launch.
        launch: a function of the formula's arguments.
    """

    def launched(*args: Any) -> Any:
        return getattr(import_module(f"vlmpack.backends.{kernels}"), launch)(*args)

    name = _LIBRARY.define(schema)
    _LIBRARY.impl(name, formula, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, launched, "CUDA")
