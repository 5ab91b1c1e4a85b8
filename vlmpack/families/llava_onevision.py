"""LLaVA-OneVision: any-resolution tiles, unpadded by the image's own shape, a newline a row.

    one image      the whole image as one tile, then the tiles of the grid (one of the model's
                   `image_grid_pinpoints`) that it fits best, scaled and padded with black to fill
    several        one padded square tile each

    tile -> SigLIP tower -> projector -> a token for each patch
    grid of tiles -> one map of tokens without its padding -> a newline after each row

The tokens of a single image are those of the whole image, then those of the map. One image among
several has the tokens of its tile and one newline. The choice depends on how many images the
*sample* has, as in the family's processor where images are nested by conversation.

Of the grid's tokens some are kept:

    image of 4 x 3 -> the grid that it fits best, say 2 x 2 tiles, scaled to fill its width
    2 x 2 tiles of 27 x 27 tokens -> a map of 54 x 54 -> rows of padding above and below cut off,
    54 x 42 -> made smaller where that is more than `max_tiles` tiles' worth of tokens
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import ImageFeatures, ImageLayout, ModulePaths
from vlmpack.families.configs import processor_setting
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.image_processor import ProcessorRule, blank, family_processor, media_of
from vlmpack.families.tiles import canvas_of, patch_rows, stacked_tiles, tiles_by_image, whole_tower
from vlmpack.model_folder.load import load_config
from vlmpack.packing import Media
from vlmpack.recipe.data import ImagesSection

_MAX_TILES = re.compile(r"anyres_max_(\d+)")


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The tokens of a grid of tiles, before and after padding is cut off.

    Args:
        rows: rows of the remaining map.
        columns: columns of the remaining map.
        top: rows cut off at the top, and as many at the bottom.
        left: columns cut off at the left, and as many at the right.
        height: rows after downscaling; `rows` without.
        width: columns after downscaling; `columns` without.
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
    """Where an image's tokens lie. It is read from a config, so that the rule and the model cannot
    differ.

    Args:
        pinpoints: (height, width) in pixels of the allowed grids.
        max_tiles: most tokens of a map, in tiles.
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


IMAGE_TOKEN = "<image>"


@dataclass(frozen=True)
class OneVisionImageRule(ProcessorRule):
    """One image in tiles, several in one tile each."""

    pictures_are_whole: ClassVar[bool] = False
    anyres: AnyRes

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """One run of placeholders."""
        side = self.anyres.side
        if num_images > 1:
            tiles, tokens = 1, side**2 + 1
        else:
            tiles = 1 + math.prod(self.anyres.grid(width, height))
            tokens = side**2 + self.anyres.token_map(width, height).num_tokens
        return ImageLayout(grid=(tiles, side, side), text=IMAGE_TOKEN, runs=(tokens,))

    def preprocess(self, images: Sequence[Image]) -> Media:
        """transformers' own image processor, with the images of one conversation.

        The tower's convolution ignores what exceeds whole patches, and so do the rows.
        """
        tiles = self.processor(images=[list(images)], return_tensors="pt")["pixel_values"]
        layouts = [self.layout(*image.size, num_images=len(images)) for image in images]
        counts = [layout.grid[0] for layout in layouts]
        seen = self.anyres.side * self.anyres.patch
        pixels = torch.cat([own[:count] for own, count in zip(tiles, counts, strict=True)])
        rows = patch_rows(pixels[..., :seen, :seen], self.anyres.patch)
        return media_of(rows, layouts, [image.size for image in images])

    def smallest(self) -> Media:
        """One image of one tile, and the whole once more: a map has newlines."""
        size = (self.anyres.tile, self.anyres.tile)
        return blank(self.layout(*size), 3 * self.anyres.patch**2, size)

    def pictures(self, media: Media) -> list[Image]:
        """The tiles of the grid put together, padding included; the whole image, which comes before
        them, is shown where there is no grid."""
        shown = []
        for size, image in zip(_sizes(media), tiles_by_image(media), strict=True):
            whole, grid = image[0], image[1:]
            shown.append(
                self.shown(canvas_of(grid, *self.anyres.grid(*size)) if len(grid) else whole)
            )
        return shown


@dataclass(frozen=True, kw_only=True)
class LlavaOneVision(ImageFamily):
    """The family; see `vlmpack.families.Family`."""

    image_token: str = IMAGE_TOKEN

    def image_rule(self, folder: Path, budget: ImagesSection) -> OneVisionImageRule:
        """The rule with the sizes that config.json and the processor's files agree on.

        Raises:
            ValueError: they do not, or are of another kind than this family's.
        """
        config = load_config(folder)
        processor = family_processor(folder, "LlavaOnevisionImageProcessor")
        anyres = AnyRes.of(config)
        _refuse_other_towers(config)
        size, tile = processor.size, anyres.tile
        said = {
            "size": ((size["height"], size["width"]), (tile, tile)),
            "image_grid_pinpoints": (_pairs(processor.image_grid_pinpoints), anyres.pinpoints),
            "num_image_tokens": (
                processor_setting(folder, "num_image_tokens", anyres.side**2),
                anyres.side**2,
            ),
            "vision_aspect_ratio": (
                processor_setting(folder, "vision_aspect_ratio", "anyres_max_9"),
                config.vision_aspect_ratio,
            ),
        }
        for name, (theirs, models) in said.items():
            if theirs != models:
                raise ValueError(f"{name} is {theirs}, but config.json makes it {models}")
        return OneVisionImageRule(folder, anyres)

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Tiles padded to the largest number of an image, sizes as (height, width), and how many
        images each sample has.

        One tile alone is seen among several.

        Raises:
            CapabilityError: an image of one tile alone, without others.
        """
        tiles, counts = stacked_tiles(media), [count for count, _, _ in media.grid_thw]
        filled = [pad(own, (0, 0) * 3 + (0, max(counts) - len(own))) for own in tiles.split(counts)]
        numbers: list[int] = []
        for is_alone, group in groupby(counts, key=lambda count: count == 1):
            several = len(list(group))
            if is_alone and several == 1:
                raise CapabilityError("an image of one tile stands alone, expected several of them")
            numbers += [several] if is_alone else [1] * several
        device = media.pixel_values.device
        sizes = [(height, width) for width, height in _sizes(media)]
        return {
            "pixel_values": torch.stack(filled),
            "image_sizes": torch.tensor(sizes, device=device),
            "batch_num_images": torch.tensor(numbers, device=device),
        }

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """Tower and projector by hand: `get_image_features` reads sizes back on the host."""
        config, inner = model.config, model.model
        output = inner.vision_tower(stacked_tiles(media), output_hidden_states=True)
        states, layers = output.hidden_states, config.vision_feature_layer
        picked = [states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        features = inner.multi_modal_projector(whole_tower(torch.cat(picked, dim=-1), output))
        counts = [count for count, _, _ in media.grid_thw]
        anyres, newline = AnyRes.of(config), inner.image_newline
        parts: list[Tensor] = []
        for size, image in zip(_sizes(media), features.split(counts), strict=True):
            parts.append(image[0])
            if len(image) == 1:
                parts.append(newline[None].to(image.dtype))
            else:
                parts.append(_with_newlines(image[1:], anyres, size, newline))
        return ImageFeatures(torch.cat(parts))

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """A tower whose attention stays inside a tile."""
        vision, out = config["vision_config"], flops.size(config["text_config"], "hidden_size")
        layers = config["vision_feature_layer"]
        read = 1 if isinstance(layers, int) else len(layers)
        width = flops.size(vision, "hidden_size")
        return flops.tiled_tower(vision, merger_weights=read * width * out + out**2)


def _with_newlines(tiles: Tensor, anyres: AnyRes, size: tuple[int, int], newline: Tensor) -> Tensor:
    """(n, D) tokens of a grid of tiles.

    Args:
        tiles: (rows * columns, side * side, D).
        size: (width, height) of the image.
    """
    found, side = anyres.token_map(*size), anyres.side
    grid = tiles.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    whole = canvas_of(grid, *anyres.grid(*size))
    own = whole[:, found.top : found.top + found.rows, found.left : found.left + found.columns]
    if found.is_smaller:
        own = interpolate(own[None], [found.height, found.width], mode="bilinear")[0]
    ends = newline.to(own.dtype)[:, None, None].expand(-1, found.height, 1)
    return torch.cat([own, ends], dim=2).flatten(1).T


def _sizes(media: Media) -> tuple[tuple[int, int], ...]:
    assert media.image_sizes is not None, "this family's images need their sizes"
    return media.image_sizes


def _pairs(pinpoints: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(height), int(width)) for height, width in pinpoints)


def _refuse_other_towers(config: Any) -> None:
    """A tower with a class token would need another rule."""
    tower, strategy = config.vision_config.model_type, config.vision_feature_select_strategy
    if (tower, strategy) != ("siglip_vision_model", "full"):
        raise ValueError(
            f"the tower is {tower!r} with vision_feature_select_strategy {strategy!r}, expected "
            f"'siglip_vision_model' with 'full'"
        )


FAMILY = LlavaOneVision(
    name="llava_onevision",
    model_types=("llava_onevision",),
    modules=ModulePaths(
        vision="model.vision_tower",
        projectors=("model.multi_modal_projector", "model.image_newline"),
        language="model.language_model",
    ),
)
