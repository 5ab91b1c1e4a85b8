"""Which process of a replica makes the pixels of which image, before any image is read.

The processes that share a row's images each decode only those that they run through the vision
tower. So all must agree on the owner of every image, even of files that only one can read. The
owner follows from the plan alone. The row's planned patches lie on a line, sample by sample, cut
into equal parts. An image belongs to the part that its middle lies in.

    planned patches   | a: 64 64 | b: 128 | c: 32 32 |      320, parts of 160 for 2 processes
    middles                32 96     192      272 304
    owner                  0  0      1        1   1

A sample's own images are read with its text. A sample that becomes a hole keeps its place on the
line, so no image is decoded for nothing, or twice.

`deal_media` deals the images of a finished row to the ranks that run the vision tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch

from vlmpack.errors import PackingError
from vlmpack.packing.batch import GridTHW, ImageOwners, Media, MediaPart, PackedBatch


def join_owners(parts: Sequence[ImageOwners | None]) -> ImageOwners | None:
    """The owners of images one after the other; None where no part has any.

    Raises:
        ValueError: parts of several processes, or only some parts with owners.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    first = known[0]
    if len(known) < len(parts) or any((p.rank, p.size) != (first.rank, first.size) for p in known):
        raise ValueError(f"images of several processes: {[*parts]}; expected those of one")
    return ImageOwners(tuple(rank for part in known for rank in part.ranks), first.rank, first.size)


@dataclass(frozen=True, slots=True)
class RowOwners:
    """One process's part of a row's images.

    Args:
        rank: among the processes that own images; None for one that runs no vision tower.
        turn: added to every owner. The middle of a row of one image is always in the same part, so
            turns give each process about equally much.
    """

    rank: int | None
    size: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class SampleOwners:
    """A sample's place on its row's line: planned patches before it, and of the row."""

    row: RowOwners
    before: int
    total: int

    def owner(self, before: int, patches: int) -> int:
        """The rank that makes an image's pixels; `before` are patches of the sample's earlier
        images.
        """
        size, middle = self.row.size, 2 * (self.before + before) + patches
        part = min(size - 1, middle * size // (2 * max(1, self.total)))
        return (part + self.row.turn) % size

    def owners(self, patches: Sequence[int]) -> ImageOwners:
        """The owners of all images of the sample."""
        ranks, before = [], 0
        for count in patches:
            ranks.append(self.owner(before, count))
            before += count
        return ImageOwners(tuple(ranks), self.row.rank, self.row.size)


def turns_of(patches: Sequence[int], size: int) -> list[int]:
    """The turn of each row of a step, the largest row first."""
    turns = [0] * len(patches)
    for place, row in enumerate(sorted(range(len(patches)), key=lambda n: (-patches[n], n))):
        turns[row] = place % size
    return turns


Key = TypeVar("Key", int, str)


def assign_images(grid_thw: Sequence[GridTHW], size: int) -> list[list[int]]:
    """Image numbers by rank, ascending: largest image first, to the rank with the fewest patches.

    A pure function of the grids, so every rank finds the same answer without communication.
    """
    owners = spread_by_size({n: t * h * w for n, (t, h, w) in enumerate(grid_thw)}, size)
    return [[n for n in range(len(grid_thw)) if owners[n] == rank] for rank in range(size)]


def spread_by_size(sizes: Mapping[Key, int], count: int) -> dict[Key, int]:
    """Deal sized things to `count` ranks, the largest first, each to the rank with least.

    Returns:
        The rank of each, equal on every rank.
    """
    loads = [0] * count
    owners: dict[Key, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        owners[key] = loads.index(min(loads))
        loads[owners[key]] += sizes[key]
    return owners


def deal_media(batch: PackedBatch, *, rank: int, size: int) -> PackedBatch:
    """The batch with only this rank's images, and the order in which to join features.

    Args:
        batch: a row on CPU, with all its images or, where each has its owner, with those of this
            rank. Without images it is returned unchanged.

    Raises:
        PackingError: the pixels are another rank's.
    """
    media = batch.media
    if media is None:
        return batch
    owners = media.owners
    if owners is not None and (owners.rank, owners.size) != (rank, size):
        raise PackingError(
            f"the row has the pixels of process {owners.rank} of {owners.size} that divide "
            f"its images, expected those of {rank} of {size}"
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
        media_part=MediaPart(order=order, counts=counts, rank=rank),
    )


def select_images(media: Media, numbers: Sequence[int]) -> Media | None:
    """Some images of a batch whose pixels are here; None for none."""
    if not numbers:
        return None
    ends = list(accumulate(media.patches_here))
    starts = [0, *ends]
    own = [media.pixel_values[starts[n] : ends[n]] for n in numbers]
    is_all = sum(map(len, own)) == len(media.pixel_values) and list(numbers) == sorted(numbers)
    by_image = ("grid_thw", "num_tokens", "image_sizes", "blocks", "seconds")
    chosen: dict[str, Any] = {
        name: tuple(values[n] for n in numbers)
        for name in by_image
        if (values := getattr(media, name)) is not None
    }
    return Media(
        pixel_values=media.pixel_values if is_all else torch.cat(own),
        **chosen,
        tower=media.tower if media.owners is not None else None,
        table=media.table,
    )
