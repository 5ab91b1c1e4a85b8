"""Where the images and videos of a sample lie among its tokens, and so their positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vlmpack.families.base import Family
from vlmpack.packing import GridTHW, Media


def positions_of(
    family: Family, num_tokens: int, media_positions: Sequence[int], media: Media | None
) -> Tensor:
    """(A, s) int64 positions of one sample, by its family's rule.

    Args:
        family: of the model.
        num_tokens: s, placeholders expanded.
        media_positions: the places of its placeholders, in order.
        media: its images and videos; pixels are not looked at.
    """
    if media is None:
        return family.positions(num_tokens, [], ())
    starts: list[int] = []
    grids: list[GridTHW] = []
    seconds: list[float | None] = []
    place = 0
    of_videos = media.seconds or [None] * media.num_images
    for grid, count, step in zip(media.grid_thw, media.num_tokens, of_videos, strict=True):
        t, h, w = grid
        pieces = t if step is not None and family.frames_apart else 1
        for _ in range(pieces):
            starts.append(media_positions[place])
            grids.append(grid if pieces == 1 else (1, h, w))
            place += count // pieces
        seconds += [step] * pieces
    if media.seconds is None:
        return family.positions(num_tokens, starts, grids)
    return family.positions(num_tokens, starts, grids, seconds)
