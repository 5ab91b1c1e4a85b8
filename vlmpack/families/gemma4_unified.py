"""Gemma 4 without a tower (12B): what a token shows goes through one dense layer, as it is.

    image   -> resized to fill a budget of tokens, as Gemma 4's are
    patches -> as large as a token; dense layer, and places along two axes -> projector: tokens
    text    -> <|image> <|image|> x n <image|>

The decoder is Gemma 4's without per-layer inputs and experts. The projection of sounds stays
unchanged, because no sample reaches it.

transformers' image processor needs torchvision. It cuts patches as Gemma 4 does and joins those of
a token, which is the same as cutting larger ones. Here Pillow resizes, as in the other families.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from vlmpack.families import flops
from vlmpack.families.base import ImageFeatures, ModulePaths
from vlmpack.families.configs import whole_config, whole_config_of
from vlmpack.families.gemma4 import (
    Gemma4,
    Gemma4ImageRule,
    bounded,
    decoder_cost,
    image_blocks,
    places_of,
)
from vlmpack.families.image_processor import PixelSettings, processor_section
from vlmpack.packing import CostModel, Media
from vlmpack.recipe.data import ImagesSection

PROCESSOR = "Gemma4UnifiedImageProcessor"

PATHS = ModulePaths(
    vision="model.embed_vision",
    projectors=("model.embed_vision.multimodal_embedder",),
    language="model.language_model",
    untouched=("model.embed_audio",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedProcessor(PixelSettings):
    """What an image processor of the family is set to; the defaults are the class's."""

    do_normalize: bool = False
    do_resize: bool = True
    patch_size: int = 16
    pooling_kernel_size: int = 3
    max_soft_tokens: int = 280


@dataclass(frozen=True)
class UnifiedImageRule(Gemma4ImageRule):
    """Gemma 4's rule, with patches as large as a token."""

    @cached_property
    def processor(self) -> UnifiedProcessor:
        """The folder's processor, with the rule's settings."""
        processor = UnifiedProcessor.of(processor_section(self.folder, PROCESSOR))
        return replace(processor, **self.settings())

    def preprocess(self, images: Sequence[Image]) -> Media:
        """The output of transformers' image processor, except that Pillow resizes."""
        layouts = [self.layout(*image.size) for image in images]
        rows = [
            self._patches(image, *layout.grid[1:])
            for image, layout in zip(images, layouts, strict=True)
        ]
        return self._media(torch.cat(rows), layouts)

    def _patches(self, image: Image, rows: int, columns: int) -> Tensor:
        """(rows * columns, side * side * 3) float32, the channels of a pixel side by side."""
        side, size = self.patch, (columns * self.patch, rows * self.patch)
        if image.size != size:
            image = image.resize(size, Resampling(self.processor.resample))
        levels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        pixels = self.processor.normalized(levels).reshape(3, rows, side, columns, side)
        return pixels.permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)


@dataclass(frozen=True, kw_only=True)
class Gemma4Unified(Gemma4):
    """The family; see `vlmpack.families.Family`."""

    modules: ModulePaths = PATHS
    needs_fixed_cache: bool = True
    video_token: str = ""

    def image_rule(self, folder: Path, budget: ImagesSection) -> UnifiedImageRule:
        """The rule with the sizes of the folder's image processor, or the budget's.

        Raises:
            ValueError: another processor than this family's, or other patches than the model's.
            CapabilityError: a budget that the processor cannot keep.
        """
        processor = UnifiedProcessor.of(processor_section(folder, PROCESSOR))
        config = whole_config_of(folder)
        if not processor.do_resize:
            raise ValueError("do_resize is false, expected true")
        made = (processor.patch_size, processor.pooling_kernel_size)
        vision = config["vision_config"]
        taken = (vision["patch_size"], vision["pooling_kernel_size"])
        if made != taken:
            raise ValueError(
                f"patch_size and pooling_kernel_size are {made}, but those of the model are {taken}"
            )
        rule = UnifiedImageRule(
            folder,
            patch=made[0] * made[1],
            pool=1,
            tokens=processor.max_soft_tokens,
            blocks=image_blocks(config),
        )
        rule = bounded(rule, budget.max_pixels)
        if rule.tokens > vision["mm_posemb_size"]:
            raise ValueError(
                f"an image may be {rule.tokens} tokens long, but the model knows the places of "
                f"{vision['mm_posemb_size']} (mm_posemb_size)"
            )
        return rule

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """The dense layer and the projector on patches alone: `get_image_features` pads them, and
        counts them on the host."""
        places = torch.cat([places_of(rows, columns) for _, rows, columns in media.grid_thw])
        output = model.model.embed_vision(
            media.pixel_values, places.to(media.pixel_values.device, non_blocking=True)
        )
        return ImageFeatures(output.pooler_output)

    def decoder_arguments(
        self, model: Any, input_ids: Tensor, media_positions: Tensor
    ) -> dict[str, Any]:
        """Nothing: the class has no per-layer inputs."""
        return {}

    def class_arguments(
        self, model: Any, arguments: dict[str, Any], *, generates: bool = False
    ) -> dict[str, Any]:
        """The arguments with the masks that the class prepares in `generate`, which are Gemma 4's
        own.

        There an image's tokens see both ways within the sliding window, and layers with full
        attention are causal. The masks that its forward makes (transformers 5.23) reach beyond the
        window, and see both ways in layers with full attention too.
        """
        if generates:
            return arguments
        ids, kinds = arguments["input_ids"], arguments.get("mm_token_type_ids")
        masks = model.create_masks_for_generate(
            config=model.config,
            inputs_embeds=torch.empty(*ids.shape, 1, dtype=model.dtype, device=ids.device),
            attention_mask=arguments["attention_mask"],
            position_ids=None,
            mm_token_type_ids=kinds,
            **{_name_of_cache(model.create_masks_for_generate): None},
        )
        return {**arguments, "attention_mask": masks}

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """The decoder's, and that of two layers for each token of an image."""
        whole = whole_config(config)
        return decoder_cost(whole, self.tower(whole))

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """One layer without attention."""
        vision, size = config["vision_config"], flops.size
        side = size(vision, "patch_size") * size(vision, "pooling_kernel_size")
        width = size(vision, "mm_embed_dim")
        return flops.Tower(
            width=width,
            weights=3 * side**2 * width,
            full_layers=0,
            merger_weights=width * size(config["text_config"], "hidden_size"),
        )


FAMILY = Gemma4Unified(name="gemma4_unified", model_types=("gemma4_unified",))


def _name_of_cache(function: Callable[..., Any]) -> str:
    """What a function of transformers calls the keys and values: `cache` from 5.24 on."""
    named = inspect.signature(function).parameters
    return "cache" if "cache" in named else "past_key_values"
