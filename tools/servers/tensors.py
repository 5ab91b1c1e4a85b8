"""Tensors of a model folder as a loader sees them: a shape, and the names that they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tools.servers.values import Unknown


class Weight:
    """A tensor of a file, or a piece or a join of some.

    Args:
        value: on the meta device, for its shape.
        names: of the tensors that it comes from.
    """

    def __init__(self, value: torch.Tensor, names: frozenset[str]) -> None:
        self.value, self.names = value, names

    def same(self, key: Any) -> Any:
        """A piece by an index."""
        return wrapped(self.value[key], self.names)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        if not callable(found):
            return wrapped(found, self.names)
        return lambda *args, **named: wrapped(found(*args, **named), self.names)


def wrapped(value: Any, names: frozenset[str]) -> Any:
    """A result of torch, whose tensors have the same source."""
    if isinstance(value, torch.Tensor):
        return Weight(value, names)
    if isinstance(value, tuple | list) and any(isinstance(x, torch.Tensor) for x in value):
        return (
            type(value)(wrapped(x, names) for x in value)
            if type(value) in (tuple, list)
            else tuple(wrapped(x, names) for x in value)
        )
    return value


def joined(weights: Sequence[Any], dim: int = 0, **_: Any) -> Any:
    """`torch.cat`; of other tensors than a folder's, what is not known."""
    return _together(torch.cat, weights, dim)


def stacked(weights: Sequence[Any], dim: int = 0, **_: Any) -> Any:
    """`torch.stack`, as `joined`."""
    return _together(torch.stack, weights, dim)


def blank(weight: Any, **_: Any) -> Any:
    """`torch.zeros_like`; of no tensor of a folder's."""
    return Weight(weight.value, frozenset()) if isinstance(weight, Weight) else Unknown("zeros")


def _together(how: Callable[..., torch.Tensor], weights: Sequence[Any], dim: int) -> Any:
    if isinstance(weights, Unknown) or not all(isinstance(one, Weight) for one in weights):
        return Unknown("tensors")
    return Weight(how([one.value for one in weights], dim=dim), sources(weights))


def sources(weights: Iterable[Any]) -> frozenset[str]:
    """The names that weights come from."""
    return frozenset().union(*(w.names for w in weights if isinstance(w, Weight)))
