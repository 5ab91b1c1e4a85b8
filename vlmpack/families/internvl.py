"""InternVL in transformers' format: square tiles and a thumbnail, pixel shuffle, several decoders.

    image -> the canvas of columns x rows tiles whose shape is nearest to its own -> tiles, and the
             whole image once more as a thumbnail where there are several
    tile  -> tower -> 2 x 2 patches joined (pixel shuffle) -> projector -> the same number of tokens
    text  -> <img> <IMG_CONTEXT> x (tokens of all tiles, the thumbnail last) </img>

The family's processor class cuts tiles whatever `crop_to_patches` of preprocessor_config.json says
(the published files say false), and so does this rule.

Each frame of a video is one tile, after its number, whatever its time.

    Frame1: <img> <IMG_CONTEXT> x (tokens of a tile) </img> \\n Frame2: <img> ...

All stored frames are used, as by transformers' InternVLVideoProcessor with do_sample_frames=False.
That class needs torchvision. Here Pillow resizes frames as it does images, and levels become pixels
by the arithmetic of that backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling

from vlmpack.families import flops
from vlmpack.families.base import Clip, ImageFeatures, ImageLayout
from vlmpack.families.configs import check_image_length, refuse_other_values, video_section
from vlmpack.families.coordinates import CoordinateRule
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.image_processor import (
    PixelSettings,
    ProcessorRule,
    blank,
    family_processor,
    media_of,
)
from vlmpack.families.tiles import (
    canvas_of,
    flat_features,
    patch_rows,
    tiles_by_image,
    whole_tower,
)
from vlmpack.model_folder.load import load_config
from vlmpack.packing import Media
from vlmpack.recipe.data import ImagesSection

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
    """Each frame resized to a tile, its shape not kept. Tiles and patches are in pixels."""

    tile: int
    patch: int
    tile_tokens: int
    pixels: PixelSettings

    @classmethod
    def of(
        cls, folder: Path, images: Mapping[str, Any], *, tile: int, patch: int, tile_tokens: int
    ) -> FrameTileRule:
        """The rule of a model folder.

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


@dataclass(frozen=True)
class InternVLImageRule(ProcessorRule):
    """Tiles of one size; their number and arrangement follow from the shape of the image.

    Args:
        min_tiles: fewest tiles, the thumbnail not counted.
        max_tiles: most tiles, the thumbnail not counted.
    """

    tile: int
    patch: int
    tile_tokens: int
    min_tiles: int
    max_tiles: int

    @cached_property
    def _canvases(self) -> list[tuple[int, int]]:
        """(columns, rows) by their number of tiles, and by columns where that is equal."""
        sides = range(1, self.max_tiles + 1)
        return sorted(
            ((columns, rows) for columns in sides for rows in sides if self._allows(columns, rows)),
            key=lambda canvas: canvas[0] * canvas[1],
        )

    def _allows(self, columns: int, rows: int) -> bool:
        return self.min_tiles <= columns * rows <= self.max_tiles

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows) of tiles; the rule of `get_optimal_tiled_canvas` in the GOT-OCR2
        files of transformers.

        Of the canvases with the nearest ratio of width to height the later, larger one is taken as
        long as the image is larger than half of it.
        """
        if self.max_tiles == 1:
            return (1, 1)
        best, least = (1, 1), float("inf")
        for columns, rows in self._canvases:
            difference = abs(width / height - columns / rows)
            if difference < least:
                best, least = (columns, rows), difference
            elif difference == least and width * height > 0.5 * self.tile**2 * columns * rows:
                best = (columns, rows)
        return best

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """One run between <img> and </img>."""
        columns, rows = self.canvas(width, height)
        tiles = columns * rows
        return self._layout(tiles if tiles == 1 else tiles + 1)  # one is the whole image itself

    def _layout(self, tiles: int) -> ImageLayout:
        side = self.tile // self.patch
        return ImageLayout(
            grid=(tiles, side, side),
            text=f"{START}{CONTEXT}{END}",
            runs=(tiles * self.tile_tokens,),
        )

    def preprocess(self, images: Sequence[Image]) -> Media:
        """transformers' own image processor, set to cut tiles; on PIL without torchvision."""
        features = self.processor(images=list(images), return_tensors="pt", crop_to_patches=True)
        layouts = [self._layout(int(tiles)) for tiles in features["num_patches"]]
        rows = patch_rows(features["pixel_values"], self.patch)
        return media_of(rows, layouts, [image.size for image in images])

    def smallest(self) -> Media:
        """One tile of zeros."""
        return blank(self._layout(1), 3 * self.patch**2, (self.tile, self.tile))

    def settings(self) -> dict[str, Any]:
        """The bounds on tiles, in the names of preprocessor_config.json."""
        return {"min_patches": self.min_tiles, "max_patches": self.max_tiles}

    def pictures(self, media: Media) -> list[Image]:
        """The tiles put together; the thumbnail shows the same once more and is left out."""
        assert media.image_sizes is not None
        shown = []
        for size, image in zip(media.image_sizes, tiles_by_image(media), strict=True):
            columns, rows = self.canvas(*size)
            shown.append(self.shown(canvas_of(image[: columns * rows], rows, columns)))
        return shown


@dataclass(frozen=True, kw_only=True)
class InternVL(ImageFamily):
    """The family; see `vlmpack.families.Family`."""

    image_token: str = CONTEXT
    around: tuple[str, ...] = (START, END)
    pixel_knobs: tuple[str, ...] = ("max_tiles",)
    video_token: str = VIDEO
    frames_as_images: bool = True

    def video_rule(self, folder: Path, settings: Mapping[str, Any]) -> FrameTileRule:
        """The rule of the folder's video processor; its tiles are those of images.

        Raises:
            OSError, ValueError: it is another one, or of another size.
        """
        images = self.image_rule(folder, ImagesSection())
        return FrameTileRule.of(
            folder,
            settings,
            tile=images.tile,
            patch=images.patch,
            tile_tokens=images.tile_tokens,
        )

    def image_rule(self, folder: Path, budget: ImagesSection) -> InternVLImageRule:
        """The rule with the sizes that the folder's files have, or the budget's `max_tiles`.

        Raises:
            ValueError: sizes that this family does not have, or that contradict one another.
        """
        processor = family_processor(folder, "GotOcr2ImageProcessor")
        config = load_config(folder)
        size = processor.size
        if size["height"] is None or size["height"] != size["width"]:
            raise ValueError(f"size is {dict(size)}, expected a height and a width that are equal")
        least, most = processor.min_patches, budget.max_tiles or processor.max_patches
        if least > most:
            raise ValueError(
                f"at least {least} tiles (min_patches), but at most {most} (max_tiles)"
            )
        patch, tokens = _tile_tokens(config, size["height"])
        check_image_length(folder, tokens, f"a tile of {size['height']} x {size['height']} pixels")
        return InternVLImageRule(folder, size["height"], patch, tokens, least, most)

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """The class's own: tower, pixel shuffle and projector, no host reads."""
        output = model.model.get_image_features(**self.image_arguments(media))
        images = flat_features(output)
        if model.config.vision_feature_layer == -1:
            return images
        return ImageFeatures(whole_tower(images.features, output))

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """A tower whose attention stays inside a tile."""
        vision, out = config["vision_config"], flops.size(config["text_config"], "hidden_size")
        joined = round(1 / config["downsample_ratio"]) ** 2
        return flops.tiled_tower(
            vision,
            merger_weights=joined * flops.size(vision, "hidden_size") * out + out**2,
            patches_per_token=joined,
            sides=(vision["image_size"][0], vision["patch_size"][0]),
            class_tokens=1,
        )


def _tile_tokens(config: Any, tile: int) -> tuple[int, int]:
    """Side of a patch, and tokens of a tile, from a transformers config."""
    vision = config.vision_config
    if len({*vision.patch_size}) != 1:
        raise ValueError(f"patch_size is {vision.patch_size}, expected a square")
    if config.vision_feature_select_strategy != "default":
        raise ValueError(
            f"vision_feature_select_strategy is {config.vision_feature_select_strategy!r}, "
            f"expected 'default': the class token is no patch of the image"
        )
    if vision.use_mask_token or not isinstance(config.vision_feature_layer, int):
        raise ValueError(
            f"use_mask_token is {vision.use_mask_token} and vision_feature_layer "
            f"{config.vision_feature_layer}, expected False and one layer"
        )
    patch, joined = int(vision.patch_size[0]), round(1 / config.downsample_ratio)
    if tile % (patch * joined):
        raise ValueError(
            f"a tile of {tile} x {tile} pixels is not a whole number of tokens of "
            f"{patch * joined} x {patch * joined} (patch_size / downsample_ratio)"
        )
    return patch, (tile // patch // joined) ** 2


FAMILY = InternVL(
    name="internvl",
    model_types=("internvl",),
    coordinates=CoordinateRule(
        label="<ref>{label}</ref>",
        box="<box>[[{x1}, {y1}, {x2}, {y2}]]</box>",
        entry="{label}{shape}",
        source="internvl.readthedocs.io, chat data format",
    ),
)
