"""Square tiles as rows of patches and back, and what most towers have in common.

    tiles (N, C, H, W)  <->  rows (N * (H / side) * (W / side), C * side * side)

`Media.pixel_values` are always such rows, so that packing can count, concatenate and share them out
without knowing the family; a family whose tower takes whole tiles puts them together again, on the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from vlmpack.families.base import ImageFeatures


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
        height: patches along a tile's height.
        width: patches along its width.
        side: of a patch, in pixels.
    """
    blocks = rows.reshape(-1, height, width, rows.shape[1] // side**2, side, side)
    return blocks.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


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

    Some classes read an inner layer: what comes after it (SigLIP's last norm) has no gradient then,
    and replicas that wait for one of every parameter would fail. It gets one of zero.

    Args:
        features: made of some of the tower's hidden states.
        output: of the tower.
    """
    for rest in (output.last_hidden_state, output.pooler_output):
        if rest is not None:
            features = features + 0.0 * rest.sum()
    return features


def rgb(pixels: Tensor, mean: Sequence[float], std: Sequence[float], scale: float) -> Image:
    """An image from normalised (3, H, W) pixels.

    Args:
        pixels: as the tower takes them.
        mean: of the processor's normalisation.
        std: of the processor's normalisation.
        scale: the processor's `rescale_factor`.
    """
    levels = (pixels.permute(1, 2, 0) * torch.tensor(std) + torch.tensor(mean)) / scale
    return fromarray(levels.round().clamp(0, 255).numpy().astype(np.uint8))
