"""Any-resolution tiles: which grid an image is cut into, and which tokens of the grid are kept.

image of 4 x 3 -> the grid that it fits best, say 2 x 2 tiles, scaled to fill its width
2 x 2 tiles of 27 x 27 tokens -> a map of 54 x 54 -> rows of padding above and below cut off,
54 x 42 -> made smaller where that is more than `max_tiles` tiles' worth of tokens
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

_MAX_TILES = re.compile(r"anyres_max_(\d+)")


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The tokens of a grid of tiles, before and after what is cut off.

    Args:
        rows: tokens along the height of the map that is left.
        columns: along its width.
        top: rows cut off above, and as many below.
        left: columns cut off at the left, and as many at the right.
        height: rows after it is made smaller, `rows` where it is not.
        width: columns after it is made smaller.
    """

    rows: int
    columns: int
    top: int
    left: int
    height: int
    width: int

    @property
    def is_smaller(self) -> bool:
        """Whether it is made smaller."""
        return (self.height, self.width) != (self.rows, self.columns)

    @property
    def num_tokens(self) -> int:
        """With a newline after each row."""
        return self.height * (self.width + 1)


@dataclass(frozen=True)
class AnyRes:
    """Where an image's tokens lie; from a config, so that the rule and the model cannot differ.

    Args:
        tile: side of a tile in pixels.
        patch: side of a patch in pixels.
        pinpoints: (height, width) in pixels of the grids that there are.
        max_tiles: tiles' worth of tokens that a map may have.
    """

    tile: int
    patch: int
    pinpoints: tuple[tuple[int, int], ...]
    max_tiles: int

    @classmethod
    def of(cls, config: Any) -> AnyRes:
        """That of a transformers config.

        Raises:
            ValueError: an aspect ratio or grids of another kind.
        """
        limit = _MAX_TILES.fullmatch(config.vision_aspect_ratio)
        if limit is None:
            raise ValueError(
                f"vision_aspect_ratio is {config.vision_aspect_ratio!r}, expected anyres_max_<n>"
            )
        tile = int(config.vision_config.image_size)
        pinpoints = tuple((int(h), int(w)) for h, w in config.image_grid_pinpoints)
        if not pinpoints or any(h % tile or w % tile for h, w in pinpoints):
            raise ValueError(
                f"image_grid_pinpoints are {pinpoints}, expected multiples of image_size {tile}"
            )
        return cls(tile, int(config.vision_config.patch_size), pinpoints, int(limit[1]))

    @property
    def side(self) -> int:
        """Tokens along a tile's side."""
        return self.tile // self.patch

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tiles; the rule of `select_best_resolution` in transformers."""
        best, most, least_waste = self.pinpoints[0], 0, float("inf")
        for rows, columns in self.pinpoints:
            scale = min(columns / width, rows / height)
            area = min(int(width * scale) * int(height * scale), width * height)
            waste = rows * columns - area
            if area > most or (area == most and waste < least_waste):
                best, most, least_waste = (rows, columns), area, waste
        return best[0] // self.tile, best[1] // self.tile

    def token_map(self, width: int, height: int) -> TokenMap:
        """The tokens of an image's grid; the rule of `unpad_image` and `pack_image_features` in
        transformers' LLaVA-OneVision files, and of `_get_unpadded_features` in its processor."""
        rows, columns = (count * self.side for count in self.grid(width, height))
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        rows, columns = rows - 2 * top, columns - 2 * left
        ratio = math.sqrt(rows * columns / (self.max_tiles * self.side**2))
        smaller = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
        return TokenMap(rows, columns, top, left, *smaller)
