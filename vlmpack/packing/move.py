"""Batches to the device, and pixels that travel there as the uint8 levels they were made of.

    worker    levels = round((pixel - black) * 255 / (white - black))       a quarter of the bytes
    device    pixel = table[kind of its column, level]                      one lookup

An image processor maps a level to a float32, with one map per channel. Its arithmetic is not
repeated here, because another order of the same operations rounds differently. The table is read
off the pixels themselves. A row that the table does not reproduce bit for bit stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    PixelTable,
    TowerInputs,
    TowerSegments,
)
from vlmpack.packing.prefix_tree import PrefixLevel

Part = Media | PixelTable | ContextSlice | MediaShare | PrefixLevel | TowerInputs | TowerSegments
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
        elif field.name == "prefix_levels":
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


NUM_LEVELS = 256
PART = 1 << 16
"""Numbers that are worked on at once: what lies between two steps stays in a core's cache."""


def pixels_of(media: Media, dtype: torch.dtype) -> Tensor:
    """(P, D) pixels in `dtype`, on the device of the images."""
    if media.table is None:
        return media.pixel_values.to(dtype)
    return _looked_up(media.pixel_values, media.table, dtype)


class LevelScale:
    """How the pixels of a family's images lie between black and white.

    Args:
        black: (P, D) float32, the patches of a black image.
        white: (P, D) float32, those of a white one.

    Raises:
        ValueError: a column has no one value for black and a larger one for white, so that its
            numbers are no levels of one channel.
    """

    def __init__(self, black: Tensor, white: Tensor) -> None:
        low, high = black[0], white[0]
        if not (
            torch.equal(black, low.expand_as(black)) and torch.equal(white, high.expand_as(white))
        ):
            raise ValueError("the rows of an image of one colour are not all the same")
        if not bool((high > low).all()):
            raise ValueError("white is not above black everywhere")
        ends = torch.stack((low, high), dim=1)
        found, kinds = torch.unique(ends, dim=0, return_inverse=True)
        self._per_unit = (NUM_LEVELS - 1) / (high - low)
        self._rounded = 0.5 - low * self._per_unit
        self._kinds = kinds.to(torch.int32)
        self._values = torch.full((len(found) * NUM_LEVELS,), torch.nan)

    def levels_of(self, pixels: Tensor) -> tuple[Tensor, PixelTable] | None:
        """(P, D) uint8 levels of (P, D) float32 pixels, and what gives them back; None where
        nothing does bit for bit."""
        levels = torch.empty(pixels.shape, dtype=torch.uint8)
        for some, into in zip(_parts(pixels), _parts(levels), strict=True):
            into.copy_(torch.addcmul(self._rounded, some, self._per_unit))
        if not self._gives(levels, pixels):
            self._values[_places(levels, self._kinds).flatten()] = pixels.flatten()
            if not self._gives(levels, pixels):
                return None
        return levels, PixelTable(values=self._values.clone(), kinds=self._kinds)

    def _gives(self, levels: Tensor, pixels: Tensor) -> bool:
        table = PixelTable(values=self._values, kinds=self._kinds)
        # As bits: -0.0 is not 0.0, and a level that was never seen is NaN.
        return all(
            torch.equal(
                _looked_up(made, table, some.dtype).view(torch.int32), some.view(torch.int32)
            )
            for made, some in zip(_parts(levels), _parts(pixels), strict=True)
        )


def as_levels(batch: BatchT, scale: LevelScale) -> BatchT:
    """The batch with its pixels as levels, or as it is where they are none."""
    media = batch.media
    if media is None or media.table is not None:
        return batch
    found = scale.levels_of(media.pixel_values)
    if found is None:
        return batch
    return replace(batch, media=replace(media, pixel_values=found[0], table=found[1]))


def _looked_up(levels: Tensor, table: PixelTable, dtype: torch.dtype) -> Tensor:
    values = table.values.to(dtype)  # before the lookup, which then writes what is kept
    return values.index_select(0, _places(levels, table.kinds).flatten()).view(levels.shape)


def _parts(rows: Tensor) -> Sequence[Tensor]:
    return torch.split(rows, max(1, PART // rows.shape[1]))


def _places(levels: Tensor, kinds: Tensor) -> Tensor:
    """(P, D) int32, where the values of levels stand."""
    return kinds * NUM_LEVELS + levels
