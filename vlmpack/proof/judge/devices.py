"""Batches go where the model is, and what is compared comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its batches: its first parameter's device."""
    first = next(model.parameters(), None)
    return CPU if first is None else first.device


def on(value: Any, device: torch.device) -> Any:
    """The same with its tensors on a device, in mappings, lists and tuples at any depth; itself
    where they are there."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        moved = {name: on(each, device) for name, each in value.items()}
        return value if all(moved[name] is each for name, each in value.items()) else moved
    if isinstance(value, list | tuple):
        parts = [on(each, device) for each in value]
        if all(one is other for one, other in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
