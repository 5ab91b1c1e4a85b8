"""Batches to the device, and into memory from which that is asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vlmpack.packing.batch import (
    BatchT,
    ContextSlice,
    Media,
    MediaShare,
    PackedBatch,
    PaddedBatch,
)
from vlmpack.packing.fork_paths import ForkPath
from vlmpack.packing.pixel_table import PixelTable
from vlmpack.packing.vision import TowerInputs, TowerSegments

Part = Media | PixelTable | ContextSlice | MediaShare | ForkPath | TowerInputs | TowerSegments
TensorsT = TypeVar("TensorsT", bound=PackedBatch | PaddedBatch | Part)


def _map_tensors(value: TensorsT, function: Callable[[Tensor], Tensor]) -> TensorsT:
    """A copy with `function` applied to each tensor."""
    changed: dict[str, Any] = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Tensor):
            changed[field.name] = function(item)
        elif isinstance(item, Part):
            changed[field.name] = _map_tensors(item, function)
        elif field.name == "fork_paths":
            changed[field.name] = tuple(_map_tensors(each, function) for each in item)
    return replace(value, **changed)


def pin_batch(batch: BatchT) -> BatchT:
    """The batch in page-locked memory, from which a copy to a GPU can be asynchronous."""
    return _map_tensors(batch, lambda tensor: tensor.pin_memory())


def move_batch(batch: TensorsT, device: torch.device) -> TensorsT:
    """The batch, or a part of one, on `device`; asynchronous where the source is pinned."""
    if device.type == "cpu":
        return batch
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
