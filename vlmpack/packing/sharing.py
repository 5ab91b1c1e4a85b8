"""Sharing the images of a row out over the ranks that would otherwise all run the vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import torch

from vlmpack.errors import PackingError
from vlmpack.packing.batch import GridTHW, Media, MediaShare, PackedBatch

Key = TypeVar("Key", int, str)


def assign_images(grid_thw: Sequence[GridTHW], size: int) -> list[list[int]]:
    """Image numbers by rank, ascending: largest image first, to the rank with the fewest patches.

    A pure function of the grids, so that every rank finds the same answer without asking.
    """
    owners = spread_by_size({n: t * h * w for n, (t, h, w) in enumerate(grid_thw)}, size)
    return [[n for n in range(len(grid_thw)) if owners[n] == rank] for rank in range(size)]


def spread_by_size(sizes: Mapping[Key, int], count: int) -> dict[Key, int]:
    """Deal sized things out to `count` ranks, the largest first, each to the rank with least.

    Returns:
        The rank of each; the same on every rank.
    """
    loads = [0] * count
    owners: dict[Key, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        owners[key] = loads.index(min(loads))
        loads[owners[key]] += sizes[key]
    return owners


def share_media(batch: PackedBatch, *, rank: int, size: int) -> PackedBatch:
    """The batch with only this rank's images, and the order in which features come together.

    Args:
        batch: a row on CPU, with all its images or, where each has its owner, with those of this
            rank; without images it is returned as it is.
        rank: this rank among those that share the work.
        size: their number.

    Raises:
        PackingError: the pixels are another rank's.
    """
    media = batch.media
    if media is None:
        return batch
    owners = media.owners
    if owners is not None and (owners.rank, owners.size) != (rank, size):
        raise PackingError(
            f"the row has the pixels of process {owners.rank} of {owners.size} that share its "
            f"images out, expected those of {rank} of {size}"
        )
    by_rank = assign_images(media.grid_thw, size) if owners is None else owners.by_rank()
    counts = tuple(sum(media.num_tokens[n] for n in mine) for mine in by_rank)
    widest = max(counts)
    starts = [0] * media.num_images
    for owner, mine in enumerate(by_rank):
        offset = owner * widest
        for number in mine:
            starts[number] = offset
            offset += media.num_tokens[number]
    order = torch.cat(
        [
            torch.arange(start, start + count)
            for start, count in zip(starts, media.num_tokens, strict=True)
        ]
    )
    return replace(
        batch,
        media=select_images(media, by_rank[rank]),
        media_share=MediaShare(order=order, counts=counts, rank=rank),
    )


def select_images(media: Media, numbers: Sequence[int]) -> Media | None:
    """Some images of a batch whose pixels are here; None for none."""
    if not numbers:
        return None
    ends = list(accumulate(media.patches_here))
    starts = [0, *ends]
    own = [media.pixel_values[starts[n] : ends[n]] for n in numbers]
    is_all = sum(map(len, own)) == len(media.pixel_values) and list(numbers) == sorted(numbers)
    sizes, blocks, seconds = media.image_sizes, media.blocks, media.seconds
    return Media(
        pixel_values=media.pixel_values if is_all else torch.cat(own),
        grid_thw=tuple(media.grid_thw[n] for n in numbers),
        num_tokens=tuple(media.num_tokens[n] for n in numbers),
        image_sizes=None if sizes is None else tuple(sizes[n] for n in numbers),
        blocks=None if blocks is None else tuple(blocks[n] for n in numbers),
        seconds=None if seconds is None else tuple(seconds[n] for n in numbers),
        tower=media.tower if media.owners is not None else None,
        table=media.table,
    )
