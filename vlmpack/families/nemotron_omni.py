"""Nemotron Omni, its vision half: Nemotron-H with a RADIO tower for images of any shape.

    image   -> patches, class and register tokens in front of them -> tower, attention inside images
    patches -> 2 x 2 put beside one another -> projector: tokens
    text    -> <img> <image> x n </img>

No sample reaches the tower for sounds, its projector, and the embedding of video, so they stay
unchanged. The class adds a norm after the tower where the language model has layers of multi-token
prediction. No published file holds it, so it stays unchanged too, and servers use it without
weights.

Images keep their shape and are scaled into a range of patches. An image of w x h pixels has w / p
by h / p patches of p pixels, rounded up. An odd number of whole patches may gain one, because
Python rounds halves to even. Grids above the upper bound shrink and those below the lower one grow,
by one factor for both sides. Each side is then made even, upwards where the upper bound has room.
The upper bound follows from the processor's own and from its assumed context length of the language
model, which one image may fill.

transformers has this processor only on torchvision, which resizes float32 levels by torch's own
interpolation. Calling that without torchvision gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import ImageFeatures, ImageLayout, ModulePaths
from vlmpack.families.configs import whole_config, whole_config_of
from vlmpack.families.flops import nemotron_h_decoder
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.image_processor import (
    PixelSettings,
    ProcessorRule,
    blank,
    media_of,
    processor_section,
)
from vlmpack.families.tiles import patch_rows, tiles_of
from vlmpack.packing import CostModel, GridTHW, Media
from vlmpack.recipe.data import ImagesSection

START, IMAGE, END = "<img>", "<image>", "</img>"

PROCESSOR = "NemotronH_Omni_Reasoning_V3ImageProcessor"

MERGE = 2
"""Patches along each side of a token: the class takes no other number."""

RESERVED = 4
"""Tokens of the context that the processor leaves to the text."""

MODES = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of filters, and torch's names of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniProcessor(PixelSettings):
    """What an image processor of the family is set to; the defaults are the class's."""

    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    patch_size: int = 16
    downsample_ratio: float = 0.5
    min_num_patches: int = 1024
    max_num_patches: int = 13312
    max_model_len: int = 16384

    @classmethod
    def of_folder(cls, folder: Path) -> OmniProcessor:
        """That of a model folder.

        Raises:
            OSError: its files are missing.
            ValueError: they are of another processor, or hold other values than this rule follows.
        """
        processor = cls.of(processor_section(folder, PROCESSOR))
        if processor.resample not in MODES:
            raise ValueError(f"resample is {processor.resample}, expected 2 or 3")
        if processor.downsample_ratio != 1 / MERGE:
            raise ValueError(
                f"downsample_ratio is {processor.downsample_ratio}, expected {1 / MERGE}"
            )
        return processor


@dataclass(frozen=True)
class OmniImageRule(ProcessorRule):
    """Resize into a range of patches.

    Args:
        least: patches that a smaller image grows to.
        most: patches that a larger one shrinks to; 0 for as many as the context holds.
        context: the processor's assumed context length of the language model, in tokens.
    """

    patch: int
    least: int
    most: int
    context: int

    @cached_property
    def processor(self) -> OmniProcessor:
        """The folder's processor, with the rule's settings."""
        return replace(OmniProcessor.of_folder(self.folder), **self.settings())

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """One run of placeholders between two tokens."""
        return _layout(*self.grid(width, height, num_images))

    def grid(self, width: int, height: int, num_images: int = 1) -> tuple[int, int]:
        """Rows and columns of patches; `get_patch_grid_size` of transformers' Nemotron Omni files
        with the bounds of its `_preprocess`."""
        most = self._most(num_images)
        rows, columns = (round(edge / self.patch + 0.5) for edge in (height, width))
        shrink = min(math.sqrt(most / (rows * columns)), 1.0)
        rows, columns = math.floor(shrink * rows), math.floor(shrink * columns)
        if not rows or not columns:
            raise ValueError(
                f"an image of {width} x {height} pixels has no patch left along one side within "
                f"{most} patches. This family's processor refuses it"
            )
        if most > self.least > rows * columns:
            grow = math.sqrt(self.least / (rows * columns))
            rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
        rows = _even(rows, columns, most)
        return rows, _even(columns, rows, most)

    def _most(self, num_images: int) -> int:
        """Patches that no image exceeds, where its sample has so many images."""
        most = max((self.context - RESERVED) * MERGE**2, self.least * num_images)
        return max(min(most, self.most) if self.most else most, self.least)

    def preprocess(self, images: Sequence[Image]) -> Media:
        """What transformers' image processor makes of them, bit for bit."""
        layouts = [self.layout(*image.size, len(images)) for image in images]
        rows = [
            patch_rows(self._pixels(image, *layout.grid[1:])[None], self.patch)
            for image, layout in zip(images, layouts, strict=True)
        ]
        return media_of(torch.cat(rows), layouts)

    def _pixels(self, image: Image, rows: int, columns: int) -> Tensor:
        """(3, H, W) float32. The resized levels keep what bicubic overshoots, below 0 and above
        255."""
        levels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float()
        size = (rows * self.patch, columns * self.patch)
        if levels.shape[1:] != size:
            mode = MODES[self.processor.resample]
            levels = F.interpolate(
                levels[None], size=size, mode=mode, align_corners=False, antialias=True
            )[0]
        return self.processor.normalized(levels)

    def smallest(self) -> Media:
        """One token's worth of zeros."""
        return blank(_layout(MERGE, MERGE), 3 * self.patch**2)

    def settings(self) -> dict[str, Any]:
        """Both bounds."""
        return {"min_num_patches": self.least, "max_num_patches": self.most}

    def pictures(self, media: Media) -> list[Image]:
        """Patches put back in their places."""
        counts = [rows * columns for _, rows, columns in media.grid_thw]
        return [
            self.shown(tiles_of(patches, rows, columns, self.patch)[0])
            for patches, (_, rows, columns) in zip(
                media.pixel_values.split(counts), media.grid_thw, strict=True
            )
        ]


def bounded(rule: OmniImageRule, budget: ImagesSection) -> OmniImageRule:
    """The rule with the bounds that are set, in whole patches.

    Raises:
        CapabilityError: less than a token's patches, or a bound beyond the processor's other one.
    """
    area = rule.patch**2
    least = rule.least if budget.min_pixels is None else -(-budget.min_pixels // area)
    most = rule.most if budget.max_pixels is None else budget.max_pixels // area
    if budget.max_pixels is not None and most < MERGE**2:
        raise CapabilityError(
            f"images.max_pixels: {budget.max_pixels} is less than the patches of one token, "
            f"{MERGE * rule.patch} x {MERGE * rule.patch} = {MERGE**2 * area} pixels. Use "
            f"{MERGE**2 * area} or more"
        )
    if most and least > most and budget.min_pixels is None:
        raise CapabilityError(
            f"images.max_pixels: {budget.max_pixels} is {most} patches, less than the {least} that "
            f"this model's processor enlarges small images to. Set images.min_pixels too, to "
            f"{most * area} or less"
        )
    if most and least > most:
        raise CapabilityError(
            f"images.min_pixels: {budget.min_pixels} is {least} patches, more than the {most} that "
            f"this model's processor shrinks large images to. Set images.max_pixels too, to "
            f"{least * area} or more"
        )
    return replace(rule, least=least, most=most)


def _layout(rows: int, columns: int) -> ImageLayout:
    return ImageLayout(
        grid=(1, rows, columns),
        text=f"{START}{IMAGE}{END}",
        runs=(rows * columns // MERGE**2,),
    )


def _even(side: int, other: int, most: int) -> int:
    """A side of a grid as a multiple of MERGE, upwards where that keeps within `most` patches."""
    beyond = side % MERGE
    if not beyond:
        return side
    up = side + MERGE - beyond
    return up if up * other <= most else max(MERGE, side - beyond)


PATHS = ModulePaths(
    vision="vision_model",
    projectors=("multi_modal_projector",),
    language="language_model.model",
    head="language_model.lm_head",
    untouched=(
        "audio_tower",
        "embed_audio",
        "vision_model.embeddings.video_patch_projection",
        "vision_final_layernorm",
    ),
)


@dataclass(frozen=True, kw_only=True)
class NemotronOmni(ImageFamily):
    """The family; see `vlmpack.families.Family`."""

    modules: ModulePaths = PATHS
    image_token: str = IMAGE
    around: tuple[str, ...] = (START, END)
    pixel_knobs: tuple[str, ...] = ("min_pixels", "max_pixels")

    def image_rule(self, folder: Path, budget: ImagesSection) -> OmniImageRule:
        """The rule with the sizes of the folder's image processor, or the budget's.

        Raises:
            ValueError: another processor than this family's, or other patches than the tower's.
            CapabilityError: a budget that the processor cannot keep.
        """
        processor = OmniProcessor.of_folder(folder)
        config = whole_config_of(folder)
        made = (processor.patch_size, processor.downsample_ratio)
        taken = (config["vision_config"]["patch_size"], config["downsample_ratio"])
        if made != taken:
            raise ValueError(
                f"patch_size and downsample_ratio are {made}, but those of the model are {taken}"
            )
        rule = OmniImageRule(
            folder,
            patch=processor.patch_size,
            least=processor.min_num_patches,
            most=processor.max_num_patches,
            context=processor.max_model_len,
        )
        return bounded(rule, budget)

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Patches as they are, and their grids."""
        grids = _grids(media).to(media.pixel_values.device, non_blocking=True)
        return {"pixel_values": media.pixel_values, "image_grid_hw": grids}

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """The tower's parts and the projector: `get_image_features` reads the grids back on the
        host, for every layer again. Here they are on the host from the start."""
        tower, grids = model.get_submodule(PATHS.vision), _grids(media)
        prefix = tower.config.num_summary_tokens
        lengths = grids.prod(-1) + prefix
        ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        hidden = tower.encoder(
            tower.embeddings(media.pixel_values, grids),
            cu_seqlens=ends if len(lengths) > 1 else None,  # one image is a plain sequence
        ).last_hidden_state.squeeze(0)
        order = merge_order(media.grid_thw, prefix).to(hidden.device, non_blocking=True)
        picked = hidden.index_select(0, order)
        if model.vision_final_layernorm is not None:
            picked = model.vision_final_layernorm(picked)
        merged = picked.view(-1, MERGE**2 * picked.shape[-1])
        return ImageFeatures(model.get_submodule(PATHS.projectors[0])(merged))

    def tower_modules(self) -> tuple[str, ...]:
        """The tower, the norm behind it where there is one, and the projector."""
        return ("vision_model", *PATHS.projectors, "vision_final_layernorm")

    def tower_features(self, tower: Any, media: Media) -> ImageFeatures:
        """By the parts of the model that it asks for."""
        return self.image_features(tower, media)

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """A decoder of four kinds of layers, and the tower's."""
        whole = whole_config(config)
        decoder = nemotron_h_decoder(whole["text_config"])
        return flops.cost_model(whole, self.tower(whole), decoder)

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """A tower whose attention spans a whole image.

        Its class and register tokens, ten for a thousand patches, are left out.
        """
        vision, size = config["vision_config"], flops.size
        width, layers = size(vision, "hidden_size"), size(vision, "num_hidden_layers")
        inner, matrices = int(width * vision["mlp_ratio"]), 2
        if vision["use_swiglu_ffn"]:
            inner, matrices = (inner * 2 // 3 + 7) // 8 * 8, 3
        projector = size(config, "projector_hidden_size")
        out = size(config["text_config"], "hidden_size")
        return flops.Tower(
            width=width,
            weights=layers * (4 * width**2 + matrices * width * inner)
            + width * 3 * size(vision, "patch_size") ** 2,
            full_layers=layers,
            merger_weights=MERGE**2 * width * projector + projector * out,
            patches_per_token=MERGE**2,
        )


def _grids(media: Media) -> Tensor:
    """(I, 2) int64 rows and columns of patches, on the host."""
    return torch.tensor([grid[1:] for grid in media.grid_thw])


def merge_order(grids: tuple[GridTHW, ...], prefix: int) -> Tensor:
    """Where the patches of each token lie among the tower's outputs, token by token.

        image 1: prefix, rows x columns patches; image 2: prefix, ...

    Args:
        prefix: outputs of the tower before each image's patches.

    Returns:
        (P,) int64: four for each token, row by row inside it, in the order in which the class's
        `pixel_shuffle` joins them.
    """
    order, start = [], 0
    for _, rows, columns in grids:
        start += prefix
        places = torch.arange(start, start + rows * columns)
        blocks = places.view(rows // MERGE, MERGE, columns // MERGE, MERGE)
        order.append(blocks.transpose(1, 2).flatten())
        start += rows * columns
    return torch.cat(order)


FAMILY = NemotronOmni(name="nemotron_omni", model_types=("nemotron_h_omni",))
