"""The images of samples -> those of a row, and the row to the device.

A worker sends pixels as the uint8 levels that they were made of:

    worker    levels = round((pixel - black) * 255 / (white - black))       a quarter of the bytes
    device    pixel = table[kind of its column, level]                      one lookup

An image processor maps a level to a float32, with one map per channel. Its arithmetic is not
repeated here, because another order of the same operations rounds differently. The table is read
off the pixels themselves. A row that the table does not reproduce bit for bit stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vlmpack.errors import PackingError
from vlmpack.packing.batch import (
    BatchT,
    ContextSlice,
    EncodedSample,
    Media,
    MediaPart,
    PackedBatch,
    PaddedBatch,
    PixelTable,
    Span,
    TowerInputs,
    TowerRule,
    TowerSegments,
)
from vlmpack.packing.image_owners import join_owners
from vlmpack.packing.prefix_tree import PrefixLevel

ItemT = TypeVar("ItemT")
Part = Media | PixelTable | ContextSlice | MediaPart | PrefixLevel | TowerInputs | TowerSegments
TensorsT = TypeVar("TensorsT", bound=PackedBatch | PaddedBatch | Part)


def check_media(sample: EncodedSample) -> None:
    """Check that a sample's images fit its tokens.

    Raises:
        PackingError: naming the sample, what was found and what was expected.
    """
    if sample.media_positions.ndim != 1:
        raise PackingError(
            f"sample {sample.key!r}: media_positions must be (M,), found shape "
            f"{tuple(sample.media_positions.shape)}"
        )
    num_positions = int(sample.media_positions.shape[0])
    media = sample.media
    num_expected = sum(media.num_tokens) if media is not None else 0
    if num_positions != num_expected:
        raise PackingError(
            f"sample {sample.key!r}: {num_positions} placeholder tokens, but its images need "
            f"{num_expected}; the image features would not fit the row"
        )
    if media is None:
        return
    num_patches = sum(media.patches_here)
    if len(media.num_tokens) != media.num_images or media.pixel_values.shape[0] != num_patches:
        raise PackingError(
            f"sample {sample.key!r}: pixel_values hold {media.pixel_values.shape[0]} patches of "
            f"{len(media.num_tokens)} images, but the {media.num_images} grids sum to {num_patches}"
        )
    if media.blocks is not None and tuple(map(sum, media.blocks)) != media.num_tokens:
        raise PackingError(
            f"sample {sample.key!r}: its images' blocks {media.blocks} do not sum to their "
            f"{media.num_tokens} tokens"
        )


def each_once(shown: Sequence[Media | None]) -> tuple[Media | None, Tensor | None]:
    """The images of a row, and the feature of each placeholder; None for their own order."""
    by_digest: dict[int, tuple[Media, int]] = {}
    sources, total = [], 0
    for media in shown:
        if media is None:
            continue
        count = sum(media.num_tokens)
        if id(media) not in by_digest:
            by_digest[id(media)] = media, total
            total += count
        first = by_digest[id(media)][1]
        sources.append(torch.arange(first, first + count))
    if not by_digest:
        return None, None
    images = concatenate_media([media for media, _ in by_digest.values()])
    return images, None if len(sources) == len(by_digest) else torch.cat(sources)


def media_of(samples: Sequence[EncodedSample]) -> Media | None:
    """The images of all samples in sample order, or None where there is none."""
    media = [sample.media for sample in samples if sample.media is not None]
    return concatenate_media(media) if media else None


def concatenate_media(media: Sequence[Media]) -> Media:
    """Images one after the other; at least one item."""
    owners = [item.owners for item in media]
    return Media(
        pixel_values=joined_rows([pixels_of(item, torch.float32) for item in media]),
        grid_thw=tuple(grid for item in media for grid in item.grid_thw),
        num_tokens=tuple(count for item in media for count in item.num_tokens),
        image_sizes=_of_all_images([item.image_sizes for item in media]),
        blocks=_of_all_images([item.blocks for item in media]),
        seconds=_seconds(media),
        owners=join_owners(owners) if any(owners) else None,
    )


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows of patches one after the other, on the CPU.

    numpy asks the kernel for huge pages, which torch does not. Half of a copy's time went into
    pages of 4 KiB.
    """
    return parts[0] if len(parts) == 1 else torch.from_numpy(np.concatenate(parts))


def tell_tower(batch: BatchT, rule: TowerRule | None) -> BatchT:
    """Add what the vision tower must know of a batch on CPU. Without a rule the tower works it out
    itself.
    """
    media = batch.media
    if media is None or rule is None:
        return batch
    grids = media.grid_thw
    if media.owners is not None:  # it will get the images of this process alone
        grids = tuple(g for g, mine in zip(grids, media.owners.mine, strict=True) if mine)
    return replace(batch, media=replace(media, tower=rule(grids) if grids else None))


def move_media(media: Media, device: torch.device, dtype: torch.dtype) -> Media:
    """Images on `device`, their pixels in `dtype`; asynchronous where the source is pinned."""
    moved = move_batch(media, device)
    return replace(moved, pixel_values=pixels_of(moved, dtype), table=None)


def _of_all_images(parts: Sequence[tuple[ItemT, ...] | None]) -> tuple[ItemT, ...] | None:
    """What some families know of each image; None where it is not known of all."""
    known = [part for part in parts if part is not None]
    return tuple(item for part in known for item in part) if len(known) == len(parts) else None


def _seconds(media: Sequence[Media]) -> tuple[float | None, ...] | None:
    """Those of the videos among all of them; None where there is no video."""
    if all(item.seconds is None for item in media):
        return None
    return tuple(each for item in media for each in item.seconds or [None] * item.num_images)


def image_blocks(media: Sequence[Media | None], positions: Tensor) -> tuple[Span, ...]:
    """Where runs of placeholders lie that attend in both directions.

    Args:
        positions: (M,) int64 on CPU, the row's `media_positions`.

    Raises:
        PackingError: a run with a hole in it.
    """
    shown = [item.blocks for item in media if item is not None]
    if any(blocks is None for blocks in shown):
        return ()
    runs = [count for blocks in shown for image in blocks or () for count in image]
    slots = positions.tolist()
    spans: list[Span] = []
    for count, end in zip(runs, accumulate(runs), strict=True):
        start, stop = slots[end - count], slots[end - 1] + 1
        if stop - start != count:
            raise PackingError(
                f"a run of {count} image tokens lies in slots {start} to {stop - 1}, with others "
                f"between them. Expected one stretch, since its tokens attend as a block"
            )
        spans.append((start, stop))
    return tuple(spans)


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
NUMBERS_AT_ONCE = 1 << 16
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
        """(P, D) uint8 levels of (P, D) float32 pixels, and the table that restores the pixels.
        None if no table restores them bit for bit."""
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
    levels = scale.levels_of(media.pixel_values)
    if levels is None:
        return batch
    return replace(batch, media=replace(media, pixel_values=levels[0], table=levels[1]))


def _looked_up(levels: Tensor, table: PixelTable, dtype: torch.dtype) -> Tensor:
    values = table.values.to(dtype)  # before the lookup, which then writes what is kept
    return values.index_select(0, _places(levels, table.kinds).flatten()).view(levels.shape)


def _parts(rows: Tensor) -> Sequence[Tensor]:
    return torch.split(rows, max(1, NUMBERS_AT_ONCE // rows.shape[1]))


def _places(levels: Tensor, kinds: Tensor) -> Tensor:
    """(P, D) int32, where the values of levels stand."""
    return kinds * NUM_LEVELS + levels
