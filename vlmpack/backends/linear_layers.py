"""Linear layers whose products other code computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORKING = "working_weights"


def operands(layer: Any) -> tuple[Tensor, Tensor | None]:
    """What the product of a linear layer reads: its (out, in) weight and its (out,) bias.

    Under autocast a working weight takes the place of each that has one.
    """
    # Not by the names of attributes, each of which is a call of Python.
    held, working = layer._parameters, vars(layer).get(WORKING)
    if working is not None and torch.is_autocast_enabled(held["weight"].device.type):
        held = {**held, **working}
    return held["weight"], held["bias"]


def has_hooks(*layers: nn.Module) -> bool:
    """Whether a hook would not run where a layer is read without a call of it."""
    for layer in layers:
        before = layer._forward_pre_hooks or layer._backward_pre_hooks
        if before or layer._forward_hooks or layer._backward_hooks:
            return True
    return False
