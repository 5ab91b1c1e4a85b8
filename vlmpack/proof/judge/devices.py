"""Batches go where the model is, what is compared comes back, and what others get are copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its batches: its first parameter's device."""
    first = next(model.parameters(), None)
    return CPU if first is None else first.device


def copied(value: Any) -> Any:
    """The same in memory of its own, for code that may write into it; of a list or a dict each part
    by itself, and those stay that cannot be copied."""
    if type(value) is list:
        return [copied(each) for each in value]
    if type(value) is dict:
        return {name: copied(each) for name, each in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # it is somebody's: a lock, an open file, a tensor with a graph
        return value


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
