"""Calls that stay eager inside compiled layers: attention, convolutions and recurrences.

A compiler guards on every number that it looks at. Boundaries of a row differ from those of the
last, so a layer with its attention would be compiled again for each row. No compiler looks into an
eager call. What a layer only hands to it has no guard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

_EAGER: list[Callable[..., Any]] = []
_APART: list[Callable[..., Any]] = []


def as_plain(value: Any, *, always: bool = False) -> Any:
    """The same numbers as a tensor that is no view and whose strides follow from its sizes, because
    compilers guard on both; likewise inside a tuple.

    Args:
        always: also of a tensor that is no view.
    """
    if isinstance(value, tuple):
        return tuple(as_plain(each, always=always) for each in value)
    if isinstance(value, Tensor) and (always or value._is_view()):
        return torch.ops.aten._unsafe_view(value.reshape(-1), value.shape)
    return value


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a compiled layer calls eagerly, after `keep_eager`."""
    place = len(_EAGER)
    _EAGER.append(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        is_apart = torch.compiler.is_compiling() and place < len(_APART)
        return (_APART[place] if is_apart else function)(*args, **options)

    return call


def keep_eager() -> None:
    """Have compilers leave those functions alone. It imports torch's compiler, which is large."""
    for function in _EAGER[len(_APART) :]:
        _APART.append(torch.compiler.disable(partial(_called, function)))


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return as_plain(function(*args, **options), always=True)
