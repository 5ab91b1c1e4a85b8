"""Videos of the Qwen-VL line, stored as frames: two of them to a patch along time.

    frames            f0 f1 | f2 f3 | f4          an odd last one counts twice
    Qwen2(.5)-VL      <|vision_start|> all patches <|vision_end|>, their times in the positions
    Qwen3-VL, 3.5     <0.2 seconds> <|vision_start|> f0 f1 <|vision_end|> <1.2 seconds> ...

All stored frames are used, as by transformers' video processors with do_sample_frames=False. These
need torchvision. Sizes are theirs, Pillow resizes frames as it does images, and levels become
pixels by the arithmetic of transformers' torchvision backend.

The positions of text after a video differ between versions of transformers, in models whose videos
have time in their positions.

Qwen2-VL (2409.12191, 2.1) continues after an image or a video at the largest position of all axes
plus one. transformers did so up to 5.2 at least. By 5.8 `get_rope_index` continues as after a
single frame, so text stands inside the time of a longer video. Its `generate` however puts the
first new token after all axes.

    time        4  8 12 16 |
    height      4  5  4  5 |        a video of 4 patches along time, 4 positions apart
    transformers 5         |  6  7  8
    here, and the paper    | 17 18 19
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from vlmpack.families.base import Clip, ImageLayout
from vlmpack.families.configs import refuse_other_values, video_section
from vlmpack.families.image_processor import PixelSettings, media_of
from vlmpack.packing import GridTHW, Media

VIDEO_TOKEN = "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"

WRAPPED = f"{VISION_START}{VIDEO_TOKEN}{VISION_END}"
"""What chat templates write for a video."""

MAX_ASPECT_RATIO = 200
"""The processors refuse frames that are longer than this many times their width."""

TEMPORAL_PATCH = 2
"""Frames of a patch along time; all published Qwen-VL models have 2."""

UNEVEN = 0.5
"""How much of the mean step a step between two frames may differ from it, for a family that knows
one rate alone: frames that were picked from a video's own are never quite even."""

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoBounds:
    """What the folder's video processor says of sizes.

    `min_pixels` and `max_pixels` are `size.shortest_edge` and `size.longest_edge`. `capped` is
    `cap_pixels_per_frame`, a cap that follows from `max_video_tokens`.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    capped: bool
    max_video_tokens: int

    @property
    def factor(self) -> int:
        """Pixels along a side of a token."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class QwenVideoRule(ABC):
    """What the line's video processors share."""

    bounds: VideoBounds
    pixels: PixelSettings
    processor: ClassVar[str]
    """Its class in transformers."""
    defaults: ClassVar[Mapping[str, Any]]
    """What a file that leaves a key out means by it."""

    @abstractmethod
    def resized(self, height: int, width: int, num_frames: int) -> Size:
        """What a frame is resized to.

        Raises:
            ValueError: the processor refuses it.
        """

    @abstractmethod
    def _layout(self, grid: GridTHW, clip: Clip) -> ImageLayout:
        """What a video of that grid is written as."""

    def layout(self, width: int, height: int, clip: Clip) -> ImageLayout:
        """See `vlmpack.families.VideoRule`."""
        high, wide = self.resized(height, width, len(clip.times))
        side = self.bounds.patch_size
        time = math.ceil(len(clip.times) / TEMPORAL_PATCH)
        return self._layout((time, high // side, wide // side), clip)

    def preprocess(self, frames: Sequence[Image], clip: Clip) -> Media:
        """See `vlmpack.families.VideoRule`."""
        wide, high = frames[0].size
        layout = self.layout(wide, high, clip)
        side = self.bounds.patch_size
        size = (layout.grid[2] * side, layout.grid[1] * side)
        filter_ = Resampling(self.pixels.resample)
        shown = [one if one.size == size else one.resize(size, filter_) for one in frames]
        shown += shown[-1:] * (-len(shown) % TEMPORAL_PATCH)
        levels = [torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in shown]
        pixels = torch.stack([self.pixels.normalized(one) for one in levels])
        return media_of(self._patches(pixels, layout.grid), [layout])

    def _patches(self, pixels: Tensor, grid: GridTHW) -> Tensor:
        """(t * h * w, 3 * 2 * side * side) of (2 * t, 3, H, W): tokens one after the other, in each
        its patches, in each patch (channel, time, y, x)."""
        time, high, wide = grid
        side, merge = self.bounds.patch_size, self.bounds.merge_size
        rows, columns = high // merge, wide // merge
        parts = pixels.reshape(
            time, TEMPORAL_PATCH, 3, rows, merge, side, columns, merge, side
        ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return parts.reshape(math.prod(grid), -1)

    def _tokens(self, grid: GridTHW) -> int:
        return math.prod(grid) // self.bounds.merge_size**2


class FrameBoundRule(QwenVideoRule):
    """Qwen2-VL and Qwen2.5-VL: bounds are those of a frame, and one run is a whole video."""

    processor = "Qwen2VLVideoProcessor"
    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 14,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "max_video_tokens": 128000,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }

    def resized(self, height: int, width: int, num_frames: int) -> Size:
        """As `resize` of the processor."""
        bounds = self.bounds
        most = bounds.max_pixels
        if bounds.capped:
            total = int(bounds.max_video_tokens * bounds.factor**2 * 0.9)
            per_frame = total * TEMPORAL_PATCH // num_frames
            most = max(min(most, per_frame), int(bounds.min_pixels * 1.05))
        _refuse_long(height, width)
        new = _rounded(height, width, bounds.factor)
        if math.prod(new) > most:
            return _shrunk(height, width, math.sqrt(height * width / most), bounds.factor)
        if math.prod(new) < bounds.min_pixels:
            grow = math.sqrt(bounds.min_pixels / (height * width))
            return _grown(height, width, grow, bounds.factor)
        return new

    def _layout(self, grid: GridTHW, clip: Clip) -> ImageLayout:
        seconds = TEMPORAL_PATCH / rate_of(clip)
        return ImageLayout(grid=grid, text=VIDEO_TOKEN, runs=(self._tokens(grid),), seconds=seconds)


class VolumeBoundRule(QwenVideoRule):
    """Qwen3-VL and Qwen3.5: bounds are those of all frames together, and each patch along time is
    written with its time before it, the mean of its frames'."""

    processor = "Qwen3VLVideoProcessor"
    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "max_video_tokens": 768,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }

    def resized(self, height: int, width: int, num_frames: int) -> Size:
        """As `smart_resize` of the processor's file."""
        bounds, factor = self.bounds, self.bounds.factor
        if num_frames < TEMPORAL_PATCH:
            raise ValueError(
                f"a video of {num_frames} frame; this family's processor takes {TEMPORAL_PATCH} or "
                "more: a single frame is an image"
            )
        most = bounds.max_pixels
        if bounds.capped:
            ceiling = bounds.max_video_tokens * factor**2
            per_frame = max(min(ceiling, most // num_frames), int(bounds.min_pixels * 1.05))
            most = per_frame * num_frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        _refuse_long(height, width)
        new = _rounded(height, width, factor)
        volume = round(num_frames / TEMPORAL_PATCH) * TEMPORAL_PATCH * math.prod(new)
        if volume > most:
            shrink = math.sqrt(num_frames * height * width / most)
            return _shrunk(height, width, shrink, factor)
        if volume < bounds.min_pixels:
            grow = math.sqrt(bounds.min_pixels / (num_frames * height * width))
            return _grown(height, width, grow, factor)
        return new

    def _layout(self, grid: GridTHW, clip: Clip) -> ImageLayout:
        times = [*clip.times, *clip.times[-1:] * (len(clip.times) % TEMPORAL_PATCH)]
        pairs = zip(times[::TEMPORAL_PATCH], times[1::TEMPORAL_PATCH], strict=True)
        return ImageLayout(
            grid=grid,
            text="".join(f"<{(first + last) / 2:.1f} seconds>{WRAPPED}" for first, last in pairs),
            runs=(self._tokens((1, *grid[1:])),) * grid[0],
            seconds=0.0,  # its times are text, no position
        )


def rate_of(clip: Clip) -> float:
    """Frames a second, of a video whose family knows one rate alone.

    Raises:
        ValueError: times that no rate describes.
    """
    if clip.fps is not None:
        return clip.fps
    times = clip.times
    if len(times) == 1:
        return float(TEMPORAL_PATCH)  # it has no step
    mean = (times[-1] - times[0]) / (len(times) - 1)
    steps = [after - before for before, after in pairwise(times)]
    worst = max(steps, key=lambda step: abs(step - mean))
    if abs(worst - mean) > UNEVEN * mean:
        raise ValueError(
            f"frames {worst:.3g} seconds apart among others {mean:.3g} seconds apart. This family "
            "tells a video's times by one rate, so they must be about even"
        )
    return 1 / mean


def video_rule(
    kind: type[QwenVideoRule], folder: Path, settings: Mapping[str, Any]
) -> QwenVideoRule:
    """The rule of a model folder.

    Raises:
        OSError, ValueError: the video processor is another one, or does what no rule here follows.
    """
    said = video_section(folder, kind.processor, kind.defaults, settings)
    refuse_other_values(said, _FIXED)
    size = dict(said["size"])
    if kind is FrameBoundRule:
        size["shortest_edge"] = said.get("min_pixels") or size.get("shortest_edge")
        size["longest_edge"] = said.get("max_pixels") or size.get("longest_edge")
    if not size.get("shortest_edge") or not size.get("longest_edge"):
        raise ValueError(
            f"the video processor's size is {size}, expected a shortest_edge and a longest_edge"
        )
    bounds = VideoBounds(
        patch_size=int(said["patch_size"]),
        merge_size=2,
        min_pixels=int(size["shortest_edge"]),
        max_pixels=int(size["longest_edge"]),
        capped=bool(said.get("cap_pixels_per_frame")),
        max_video_tokens=int(said["max_video_tokens"]),
    )
    return kind(bounds=bounds, pixels=PixelSettings.of(said))


_FIXED: Mapping[str, Any] = {"do_resize": True, "merge_size": 2, "temporal_patch_size": 2}
"""What every published file says."""


def _refuse_long(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(
            f"frames of {width} x {height} pixels are more than {MAX_ASPECT_RATIO} times longer "
            "than wide. This family's processor refuses them"
        )


def _rounded(height: int, width: int, factor: int) -> Size:
    return round(height / factor) * factor, round(width / factor) * factor


def _shrunk(height: int, width: int, by: float, factor: int) -> Size:
    return (
        max(factor, math.floor(height / by / factor) * factor),
        max(factor, math.floor(width / by / factor) * factor),
    )


def _grown(height: int, width: int, by: float, factor: int) -> Size:
    return (
        math.ceil(height * by / factor) * factor,
        math.ceil(width * by / factor) * factor,
    )


def behind_videos(positions: Tensor, kinds: Tensor) -> Tensor:
    """(A, B, S) positions of transformers' class, with what follows a video moved past all its
    axes.

    Args:
        positions: (A, B, S) of `get_rope_index`.
        kinds: (B, S) `mm_token_type_ids`: 0 on text, 1 on images, 2 on videos.
    """
    moved = positions.clone()
    for row, of_row in enumerate(kinds):
        is_video = torch.nn.functional.pad(of_row == 2, (1, 1))
        edges = (is_video[1:] != is_video[:-1]).nonzero()[:, 0].tolist()
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop < len(of_row):
                position = moved[:, row, first:stop].max() + 1
                moved[:, row, stop:] += position - moved[:, row, stop].min()
    return moved
