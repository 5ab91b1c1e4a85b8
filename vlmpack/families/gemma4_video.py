"""Gemma 4's videos: each frame an image of few tokens, behind its time.

    00:00 <|image> <|video|> x n <image|> 00:01 <|image> <|video|> x n <image|> ...

The tower sees each frame by itself. Frames are taken as they are stored: transformers'
Gemma4VideoProcessor with do_sample_frames=False. It has torchvision's backend alone; frames are
resized by Pillow as images are, and levels become pixels by the arithmetic of that backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling

from vlmpack.families.base import ImageLayout
from vlmpack.families.clip import Clip
from vlmpack.families.gemma4_images import END, SOFT_TOKENS, START, Gemma4ImageRule
from vlmpack.families.image_processor import media_of
from vlmpack.families.torch_pixels import PixelSettings
from vlmpack.families.video_config import refuse_other_values, video_section
from vlmpack.packing import Media

VIDEO = "<|video|>"
"""What the chat template writes for a video, and what a feature of one replaces."""

_DEFAULTS: Mapping[str, Any] = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 70}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VideoRule:
    """Each frame fills a budget of tokens at its own shape, as an image does.

    Args:
        frame: the rule of images, with the budget of frames.
        pixels: what becomes of levels.
    """

    frame: Gemma4ImageRule
    pixels: PixelSettings

    @classmethod
    def of(
        cls, folder: Path, settings: Mapping[str, Any], images: Gemma4ImageRule
    ) -> Gemma4VideoRule:
        """The rule of a model folder.

        Args:
            folder: model folder.
            settings: see `video_section`.
            images: the rule of its images.

        Raises:
            OSError, ValueError: the video processor is another one, or makes other patches.
        """
        said = video_section(folder, "Gemma4VideoProcessor", _DEFAULTS, settings)
        made = {"patch_size": images.patch, "pooling_kernel_size": images.pool}
        refuse_other_values(said, {"do_resize": True, **made})
        tokens = said["max_soft_tokens"]
        if tokens not in SOFT_TOKENS:
            raise ValueError(
                f"the video processor's max_soft_tokens is {tokens!r}, expected one of "
                f"{', '.join(map(str, SOFT_TOKENS))}"
            )
        return cls(frame=replace(images, tokens=tokens), pixels=PixelSettings.of(said))

    def layout(self, width: int, height: int, clip: Clip) -> ImageLayout:
        """See `vlmpack.families.VideoRule`."""
        one, count = self.frame.layout(width, height), len(clip.times)
        clock = [f"{int(time // 60):02d}:{int(time % 60):02d}" for time in clip.times]
        return ImageLayout(
            grid=(count, *one.grid[1:]),
            text=" ".join(f"{at} {START}{VIDEO}{END}" for at in clock),
            runs=one.runs * count,
            seconds=0.0,  # its times are text, no position
        )

    def preprocess(self, frames: Sequence[Image], clip: Clip) -> Media:
        """See `vlmpack.families.VideoRule`."""
        wide, high = frames[0].size
        layout, side = self.layout(wide, high, clip), self.frame.patch
        count, rows, columns = layout.grid
        size, filter_ = (columns * side, rows * side), Resampling(self.pixels.resample)
        shown = [one if one.size == size else one.resize(size, filter_) for one in frames]
        levels = [torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in shown]
        pixels = torch.stack([self.pixels.normalized(one) for one in levels])
        blocks = pixels.reshape(count, 3, rows, side, columns, side).permute(0, 2, 4, 3, 5, 1)
        media = media_of(blocks.reshape(count * rows * columns, -1), [layout])
        return replace(media, blocks=(layout.runs,)) if self.frame.blocks else media
