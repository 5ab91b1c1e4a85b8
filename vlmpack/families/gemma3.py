"""Gemma 3: square images, 256 tokens each, which attend to one another in both directions.

    image -> one tile of 896 x 896 pixels (its shape is not kept); with pan-and-scan, crops of long
             images as further tiles
    tile  -> SigLIP tower -> 4 x 4 patches averaged -> projector -> 256 tokens: one run, one block
    text  -> "\\n\\n" <start_of_image> <image_soft_token> x 256 <end_of_image> "\\n\\n"

Inside a run every token sees the whole run in layers with full attention. In layers with a sliding
window it sees as far back as the window reaches (`vlmpack.attention.blocks`). The chat template's
marker, <start_of_image>, is a token of the written text too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL.Image import Image, new
from torch import Tensor

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import ImageFeatures, ImageLayout
from vlmpack.families.configs import (
    check_image_length,
    final_logit_cap,
    whole_config,
    whole_config_of,
)
from vlmpack.families.image_family import TOWER_AND_PROJECTOR, ImageFamily
from vlmpack.families.image_processor import ProcessorRule, family_processor, media_of
from vlmpack.families.text_lm import TextLM
from vlmpack.families.tiles import flat_features, patch_rows, tiles_by_image
from vlmpack.packing import CostModel, Media
from vlmpack.recipe.data import ImagesSection

START, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True, slots=True)
class PanAndScan:
    """When a long image is also cut into crops; the defaults are those of Gemma3Processor.

    Args:
        min_crop_size: least side of a crop in pixels.
        max_num_crops: most crops of an image.
        min_ratio: least ratio of the longer side to the shorter at which an image is cut.
    """

    min_crop_size: int = 256
    max_num_crops: int = 4
    min_ratio: float = 1.2

    def crops(self, width: int, height: int) -> int:
        """How many crops an image has in addition to the whole of it, by `pan_and_scan` of
        transformers' Gemma 3 image processor.

        Raises:
            ValueError: a size of which that rule makes an empty crop.
        """
        long, short = max(width, height), min(width, height)
        if long / short < self.min_ratio:
            return 0
        count = min(long // self.min_crop_size, math.floor(long / short + 0.5))
        count = min(self.max_num_crops, max(2, count))
        size = math.ceil(long / count)
        if min(size, short) < self.min_crop_size:
            return 0
        if size * (count - 1) >= long:
            raise ValueError(
                f"an image of {width} x {height} pixels in {count} crops of {size}: the last is "
                f"empty; raise pan_and_scan_min_crop_size in preprocessor_config.json"
            )
        return count

    def settings(self) -> dict[str, Any]:
        """In the names of preprocessor_config.json."""
        return {
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": self.min_crop_size,
            "pan_and_scan_max_num_crops": self.max_num_crops,
            "pan_and_scan_min_ratio_to_activate": self.min_ratio,
        }


@dataclass(frozen=True)
class Gemma3ImageRule(ProcessorRule):
    """One tile an image, or several with pan-and-scan.

    Args:
        pan_and_scan: None where the folder's processor has it off.
    """

    pictures_are_whole: ClassVar[bool] = False
    tile: int
    patch: int
    tile_tokens: int
    pan_and_scan: PanAndScan | None = None

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """A run for the whole image and one for each crop."""
        crops = self.pan_and_scan.crops(width, height) if self.pan_and_scan is not None else 0
        return self._layout(crops)

    def _layout(self, crops: int) -> ImageLayout:
        side = self.tile // self.patch
        run = f"\n\n{START}{SOFT}{END}\n\n"
        text = run
        if crops:
            pieces = " ".join([run] * crops)
            text = (
                f"Here is the original image {run} and here are some crops to help you see better "
                f"{pieces}"
            )
        tiles = 1 + crops
        return ImageLayout(grid=(tiles, side, side), text=text, runs=(self.tile_tokens,) * tiles)

    def preprocess(self, images: Sequence[Image]) -> Media:
        """transformers' own image processor (the PIL one where torchvision is missing)."""
        features = self.processor(images=list(images), return_tensors="pt")
        layouts = [self._layout(int(crops)) for crops in features["num_crops"]]
        return _media(patch_rows(features["pixel_values"], self.patch), layouts)

    def smallest(self) -> Media:
        """One tile of zeros; there is none smaller."""
        layout = self._layout(0)
        return _media(torch.zeros(math.prod(layout.grid), 3 * self.patch**2), [layout])

    def settings(self) -> dict[str, Any]:
        """Pan-and-scan, all of it: its values are null in published files."""
        if self.pan_and_scan is None:
            return {"do_pan_and_scan": False}
        return self.pan_and_scan.settings()

    def pictures(self, media: Media) -> list[Image]:
        """The tile, and its crops to the right of it."""
        shown = []
        for image in tiles_by_image(media):
            canvas = new("RGB", (self.tile * len(image), self.tile))
            for place, tile in enumerate(image):
                canvas.paste(self.shown(tile), (place * self.tile, 0))
            shown.append(canvas)
        return shown


def _media(rows: Tensor, layouts: Sequence[ImageLayout]) -> Media:
    blocks = tuple(layout.runs for layout in layouts)
    return replace(media_of(rows, layouts), blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Gemma3(ImageFamily):
    """The family; see `vlmpack.families.Family`."""

    image_token: str = SOFT
    around: tuple[str, ...] = (START, END)
    opening: str | None = START
    pixel_knobs: tuple[str, ...] = ("max_tiles",)

    def image_rule(self, folder: Path, budget: ImagesSection) -> Gemma3ImageRule:
        """The rule with the sizes that the folder's files have, and the budget's `max_tiles` as the
        most crops where its processor cuts any.

        Raises:
            ValueError: sizes that this family does not have, or that contradict one another.
            CapabilityError: `max_tiles` for a processor that cuts nothing.
        """
        processor = family_processor(folder, "Gemma3ImageProcessor")
        config = whole_config_of(folder)
        tile, patch = (int(config["vision_config"][key]) for key in ("image_size", "patch_size"))
        size = (processor.size["height"], processor.size["width"])
        if size != (tile, tile):
            raise ValueError(
                f"size is {size}, but the tower takes images of {tile} x {tile} pixels"
            )
        tokens = _tile_tokens(config, tile // patch)
        check_image_length(folder, tokens, "an image (mm_tokens_per_image)")
        return Gemma3ImageRule(folder, tile, patch, tokens, _pan_and_scan(processor, budget))

    def token_arguments(self, is_image: Tensor) -> dict[str, Tensor]:
        """From these the class finds its blocks: runs of ones."""
        return {"token_type_ids": is_image.int()}

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """The class's own: tower and projector, no host reads."""
        return flat_features(model.model.get_image_features(**self.image_arguments(media)))

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """A tower whose attention stays inside a tile.

        The decoder's layers with a sliding window cost as much as the others, because attention
        with a mask computes every pair.
        """
        vision, size = config["vision_config"], flops.size
        patches = (size(vision, "image_size") // size(vision, "patch_size")) ** 2
        out = size(config["text_config"], "hidden_size")
        return flops.tiled_tower(
            vision,
            merger_weights=size(vision, "hidden_size") * out,
            patches_per_token=patches // size(config, "mm_tokens_per_image"),
        )


def _tile_tokens(config: Mapping[str, Any], side: int) -> int:
    """Tokens of a tile of side x side patches, which the projector averages in squares."""
    tokens = int(config["mm_tokens_per_image"])
    per_side = math.isqrt(tokens)
    if per_side**2 != tokens or side % per_side:
        raise ValueError(
            f"mm_tokens_per_image is {tokens}, expected a square whose side divides the "
            f"{side} patches along a tile's side"
        )
    return tokens


def _pan_and_scan(processor: Any, budget: ImagesSection) -> PanAndScan | None:
    """What the processor does, nulls filled with Gemma3Processor's defaults."""
    if not processor.do_pan_and_scan:
        if budget.max_tiles is not None:
            raise CapabilityError(
                f"images.max_tiles: {budget.max_tiles}, but this model's processor cuts no tiles "
                "(do_pan_and_scan is off in preprocessor_config.json). It resizes each image to "
                "one. Leave it out"
            )
        return None
    default = PanAndScan()
    found = PanAndScan(
        min_crop_size=processor.pan_and_scan_min_crop_size or default.min_crop_size,
        max_num_crops=processor.pan_and_scan_max_num_crops or default.max_num_crops,
        min_ratio=processor.pan_and_scan_min_ratio_to_activate or default.min_ratio,
    )
    return found if budget.max_tiles is None else replace(found, max_num_crops=budget.max_tiles)


FAMILY = Gemma3(
    name="gemma3",
    model_types=("gemma3",),
    modules=replace(TOWER_AND_PROJECTOR, image_blocks=True),
)


@dataclass(frozen=True, kw_only=True)
class Gemma3Text(TextLM):
    """The family; see `vlmpack.families.Family`."""

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        """What the file says."""
        return final_logit_cap(config)

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """The decoder's; published files leave sizes out. Layers with a sliding window are priced
        as the others."""
        return flops.cost_model(whole_config(config))


GEMMA3_TEXT = Gemma3Text(name="gemma3_text", model_types=("gemma3_text",))
"""Gemma 3's language model alone. Sliding and full attention have different rotary bases."""
