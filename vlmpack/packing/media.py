"""The images of samples -> those of a row, and where their tokens lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from vlmpack.errors import PackingError
from vlmpack.packing.batch import BatchT, EncodedSample, Media, Span, TowerRule
from vlmpack.packing.image_owners import join_owners
from vlmpack.packing.move import move_batch, pixels_of

ItemT = TypeVar("ItemT")


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
    kept: dict[int, tuple[Media, int]] = {}
    sources, total = [], 0
    for media in shown:
        if media is None:
            continue
        count = sum(media.num_tokens)
        if id(media) not in kept:
            kept[id(media)] = media, total
            total += count
        first = kept[id(media)][1]
        sources.append(torch.arange(first, first + count))
    if not kept:
        return None, None
    images = concatenate_media([media for media, _ in kept.values()])
    return images, None if len(sources) == len(kept) else torch.cat(sources)


def media_of(samples: Sequence[EncodedSample]) -> Media | None:
    """The images of all samples in sample order, or None where there is none."""
    media = [sample.media for sample in samples if sample.media is not None]
    return concatenate_media(media) if media else None


def concatenate_media(media: Sequence[Media]) -> Media:
    """Images one after the other; at least one item."""
    return Media(
        pixel_values=torch.cat([pixels_of(item, torch.float32) for item in media]),
        grid_thw=tuple(grid for item in media for grid in item.grid_thw),
        num_tokens=tuple(count for item in media for count in item.num_tokens),
        image_sizes=_of_all_images([item.image_sizes for item in media]),
        blocks=_of_all_images([item.blocks for item in media]),
        seconds=_seconds(media),
        owners=join_owners([item.owners for item in media]),
    )


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
                f"between them; expected one stretch, since its tokens attend as a block"
            )
        spans.append((start, stop))
    return tuple(spans)
