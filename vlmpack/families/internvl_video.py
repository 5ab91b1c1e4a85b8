"""InternVL's videos: each frame one tile, under its number, whatever its time.

    Frame1: <img> <IMG_CONTEXT> x (tokens of a tile) </img> \\n Frame2: <img> ...

Frames are taken as they are stored: transformers' InternVLVideoProcessor with
do_sample_frames=False. It has torchvision's backend alone; frames are resized by Pillow as images
are, and levels become pixels by the arithmetic of that backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling

from vlmpack.families.base import ImageLayout
from vlmpack.families.clip import Clip
from vlmpack.families.image_processor import media_of
from vlmpack.families.tiles import patch_rows
from vlmpack.families.torch_pixels import PixelSettings
from vlmpack.families.video_config import refuse_other_values, video_section
from vlmpack.packing import Media

START, CONTEXT, END = "<img>", "<IMG_CONTEXT>", "</img>"
VIDEO = "<video>"
"""What the chat template writes for a video."""

_DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 384, "width": 384},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_FIXED: Mapping[str, Any] = {"do_resize": True, "do_center_crop": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTileRule:
    """Each frame resized to a tile, its shape not kept.

    Args:
        tile: side of a tile in pixels.
        patch: side of a patch in pixels.
        tile_tokens: tokens of a tile.
        pixels: what becomes of levels.
    """

    tile: int
    patch: int
    tile_tokens: int
    pixels: PixelSettings

    @classmethod
    def of(
        cls, folder: Path, images: Mapping[str, Any], *, tile: int, patch: int, tile_tokens: int
    ) -> FrameTileRule:
        """The rule of a model folder.

        Args:
            folder: model folder.
            images: see `video_section`.
            tile, patch, tile_tokens: of its image rule.

        Raises:
            OSError, ValueError: the video processor is another one, or makes tiles of another size.
        """
        said = video_section(folder, "InternVLVideoProcessor", _DEFAULTS, images)
        refuse_other_values({**said, "do_center_crop": said.get("do_center_crop") or None}, _FIXED)
        size = said["size"]
        if not isinstance(size, Mapping) or (size.get("height"), size.get("width")) != (tile, tile):
            raise ValueError(
                f"the video processor's size is {size}, expected that of images, a height and a "
                f"width of {tile}"
            )
        pixels = PixelSettings.of(said)
        return cls(tile=tile, patch=patch, tile_tokens=tile_tokens, pixels=pixels)

    def layout(self, width: int, height: int, clip: Clip) -> ImageLayout:
        """See `vlmpack.families.VideoRule`."""
        count, side = len(clip.times), self.tile // self.patch
        return ImageLayout(
            grid=(count, side, side),
            text="\n".join(f"Frame{n}: {START}{CONTEXT}{END}" for n in range(1, count + 1)),
            runs=(self.tile_tokens,) * count,
            seconds=0.0,  # it has no times
        )

    def preprocess(self, frames: Sequence[Image], clip: Clip) -> Media:
        """See `vlmpack.families.VideoRule`."""
        size, filter_ = (self.tile, self.tile), Resampling(self.pixels.resample)
        shown = [one if one.size == size else one.resize(size, filter_) for one in frames]
        levels = [torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in shown]
        pixels = torch.stack([self.pixels.normalized(one) for one in levels])
        wide, high = frames[0].size
        layout = self.layout(wide, high, clip)
        return media_of(patch_rows(pixels, self.patch), [layout], [frames[0].size])
