"""Square tiles as rows of patches and back, and what most towers have in common.

    tiles (N, C, H, W)  <->  rows (N * (H / side) * (W / side), C * side * side)

`Media.pixel_values` are always such rows, so that packing can count, concatenate and split them
without knowing the family. A family whose tower takes whole tiles joins them again on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlmpack.families.base import ImageFeatures
from vlmpack.packing import Media


def patch_rows(tiles: Tensor, side: int) -> Tensor:
    """(N * h * w, C * side * side) patches of (N, C, h * side, w * side) tiles, tile by tile, row
    by row."""
    count, channels, height, width = tiles.shape
    blocks = tiles.reshape(count, channels, height // side, side, width // side, side)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * side * side)


def tiles_of(rows: Tensor, height: int, width: int, side: int) -> Tensor:
    """(N, C, height * side, width * side) tiles; the inverse of `patch_rows`.

    Args:
        rows: (N * height * width, C * side * side).
    """
    blocks = rows.reshape(-1, height, width, rows.shape[1] // side**2, side, side)
    return blocks.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def stacked_tiles(media: Media) -> Tensor:
    """(N, C, H, W) tiles of all images, which have one size."""
    _, height, width = media.grid_thw[0]
    return tiles_of(media.pixel_values, height, width, patch_side(media.pixel_values))


def tiles_by_image(media: Media) -> tuple[Tensor, ...]:
    """The tiles of each image."""
    return torch.split(stacked_tiles(media), [count for count, _, _ in media.grid_thw])


def canvas_of(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """(C, rows * H, columns * W) of (rows * columns, C, H, W) tiles, row by row."""
    grid = tiles.reshape(rows, columns, *tiles.shape[1:])
    return grid.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)


def patch_side(rows: Tensor) -> int:
    """Side in pixels of square RGB patches, (P, 3 * side * side)."""
    return math.isqrt(rows.shape[1] // 3)


def flat_features(output: Any) -> ImageFeatures:
    """(M, D) features from what a class's `get_image_features` returns: one tensor, or one for
    each image."""
    features = output.pooler_output
    parts: Sequence[Tensor] = [features] if isinstance(features, Tensor) else list(features)
    return ImageFeatures(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))


def whole_tower(features: Tensor, output: Any) -> Tensor:
    """The features, with the rest of a tower in their graph.

    Some classes read an inner layer, and what comes after it (SigLIP's last norm) has no gradient
    then. Replicas that wait for a gradient of every parameter would fail. So it gets a gradient of
    zero.
    """
    for rest in (output.last_hidden_state, output.pooler_output):
        if rest is not None:
            features = features + 0.0 * rest.sum()
    return features
