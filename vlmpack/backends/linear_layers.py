"""Linear layers whose products other code computes."""

from __future__ import annotations

from torch import nn


def has_hooks(*layers: nn.Module) -> bool:
    """Whether a hook would not run where a layer is read without a call of it."""
    return any(
        layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_pre_hooks
        or layer._backward_hooks
        for layer in layers
    )
