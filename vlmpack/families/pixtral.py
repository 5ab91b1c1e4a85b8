"""What the families with Pixtral's tower share: images of any size as rows of tokens.

[IMG][IMG]...[IMG_BREAK] [IMG][IMG]...[IMG_BREAK] [IMG][IMG]...[IMG_END]

The tower processes the patches of all images in one row. In transformers it pads images to the
largest and then separates them by a mask of P x P patches. Every call makes this mask, which is
5 GB in bfloat16 for 50,000 patches. Here patches come as rows, and attention knows where images
end. So memory grows with P, and nothing is computed between images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import ImageFeatures, ImageLayout
from vlmpack.families.configs import whole_config_of
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.image_processor import ProcessorRule, blank, family_processor, media_of
from vlmpack.families.tiles import patch_rows, patch_side, tiles_of
from vlmpack.families.tower_attention import ROWS, inputs_of, use_tower_attention
from vlmpack.packing import GridTHW, Media
from vlmpack.packing.batch import TowerInputs, TowerSegments
from vlmpack.recipe.data import ImagesSection


@dataclass(frozen=True, slots=True)
class PixtralTowerRule:
    """Grids -> inputs of the tower."""

    def __call__(self, grid_thw: Sequence[GridTHW]) -> TowerInputs:
        """The tower's inputs for some images; at least one."""
        places = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for _, h, w in grid_thw]
        return TowerInputs(
            position_ids=torch.cat(places),
            images=TowerSegments.of([t * h * w for t, h, w in grid_thw]),
        )


def tower_output(tower: Any, media: Media, inputs: TowerInputs) -> Tensor:
    """(P, W) the last layer's output for the patches of all images.

    It computes what the tower's forward does, which takes padded images and a mask. Media and
    inputs are on the tower's device, pixels in its dtype.
    """
    use_tower_attention(tower, ROWS)
    rows, side = media.pixel_values, tower.patch_size
    embeds = tower.patch_conv(rows.view(rows.shape[0], -1, side, side)).flatten(1)[None]
    embeds = tower.ln_pre(embeds)
    hidden: Tensor = tower.transformer(
        embeds,
        attention_mask=None,
        position_embeddings=tower.patch_positional_embedding(embeds, inputs.position_ids),
        tower_inputs=inputs,
    ).last_hidden_state
    return hidden.squeeze(0)


IMAGE_TOKEN = "[IMG]"
ROW_END, IMAGE_END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True)
class PixtralImageRule(ProcessorRule):
    """Shrink to within two edges in pixels, then round both up to whole tokens."""

    patch_size: int
    merge_size: int
    max_width: int
    max_height: int

    @property
    def token_size(self) -> int:
        """Side of a token in pixels."""
        return self.patch_size * self.merge_size

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """One run of placeholders a row; `get_resize_output_image_size` and `replace_image_token`
        of transformers' Pixtral files."""
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        rows, columns = (math.ceil(edge / self.token_size) for edge in (height, width))
        if not rows or not columns:
            raise ValueError(
                f"an image so much longer than wide has no pixel left across when it is shrunk to "
                f"{self.max_width} x {self.max_height}. This family's processor refuses it"
            )
        return ImageLayout(
            grid=(1, rows * self.merge_size, columns * self.merge_size),
            text=f"{IMAGE_TOKEN}{ROW_END}" * (rows - 1) + f"{IMAGE_TOKEN}{IMAGE_END}",
            runs=(columns,) * rows,
        )

    def preprocess(self, images: Sequence[Image]) -> Media:
        """transformers' own image processor (the PIL one where torchvision is missing), image by
        image: together they would be padded to the largest."""
        layouts = [self.layout(*image.size) for image in images]
        rows = [
            patch_rows(
                self.processor(images=[image], patch_size=self.token_size, return_tensors="pt")[
                    "pixel_values"
                ],
                self.patch_size,
            )
            for image in images
        ]
        return media_of(torch.cat(rows), layouts)

    def smallest(self) -> Media:
        """One token's worth of zeros."""
        grid = (1, self.merge_size, self.merge_size)
        layout = ImageLayout(grid=grid, text=IMAGE_TOKEN, runs=(1,))
        return blank(layout, 3 * self.patch_size**2)

    def settings(self) -> dict[str, Any]:
        """The two edges, as one where they are equal."""
        if self.max_width == self.max_height:
            return {"size": {"longest_edge": self.max_width}}
        return {"size": {"height": self.max_height, "width": self.max_width}}

    def pictures(self, media: Media) -> list[Image]:
        """Patches put back in their places."""
        return [self.shown(pixels) for pixels in _images(media)]


@dataclass(frozen=True, kw_only=True)
class Pixtral(ImageFamily):
    """A family with the tower; see `vlmpack.families.Family`.

    Args:
        merges: whether the projector merges neighbouring patches into a token.
    """

    image_token: str = IMAGE_TOKEN
    merges: bool
    pixel_knobs: tuple[str, ...] = ("max_pixels",)

    def image_rule(self, folder: Path, budget: ImagesSection) -> PixtralImageRule:
        """The rule with the sizes of the folder's image processor and tower.

        Raises:
            CapabilityError: the config takes the tower's features otherwise than from its end.
        """
        config = whole_config_of(folder)
        _refuse_other_features(config)
        processor = family_processor(folder, "PixtralImageProcessor")
        size = processor.size
        edges = [size.get("longest_edge") or size.get(name) for name in ("width", "height")]
        if not all(edges):
            raise ValueError(
                f"size is {dict(size)}, expected a longest_edge, or a height and a width"
            )
        rule = PixtralImageRule(
            folder=folder,
            patch_size=flops.size(config["vision_config"], "patch_size"),
            merge_size=self._merge_size(config),
            max_width=edges[0],
            max_height=edges[1],
        )
        return _bounded(rule, budget)

    def _merge_size(self, config: Mapping[str, Any]) -> int:
        return flops.size(config, "spatial_merge_size") if self.merges else 1

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Images padded to the largest, as the processor's are, and their sizes."""
        images = _images(media)
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        padded = [
            torch.nn.functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1]))
            for image in images
        ]
        sizes = torch.tensor([image.shape[1:] for image in images])
        device = media.pixel_values.device
        return {
            "pixel_values": torch.stack(padded),
            "image_sizes": sizes.to(device, non_blocking=True),
        }

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """The tower's parts on patches as they are, and the projector."""
        assert self.modules.vision is not None
        tower = model.get_submodule(self.modules.vision)
        projector = model.get_submodule(self.modules.projectors[0])
        hidden = tower_output(tower, media, inputs_of(self.tower_rule, tower, media))
        if not self.merges:
            return ImageFeatures(projector(hidden))
        side = tower.patch_size
        return ImageFeatures(
            projector(hidden, [(h * side, w * side) for _, h, w in media.grid_thw])
        )

    def tower_rule(self, vision: Mapping[str, Any]) -> PixtralTowerRule:
        """Places of patches, and where images end."""
        return PixtralTowerRule()

    def tower_rule_of(self, folder: Path) -> PixtralTowerRule:
        """From the folder's config.json."""
        return self.tower_rule(whole_config_of(folder)["vision_config"])

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """A tower whose attention spans a whole image."""
        vision, out = config["vision_config"], flops.size(config["text_config"], "hidden_size")
        width, layers = flops.size(vision, "hidden_size"), flops.size(vision, "num_hidden_layers")
        block = 4 * width**2 + 3 * width * flops.size(vision, "intermediate_size")
        merge = self._merge_size(config)
        merger = (merge * width) ** 2 if self.merges else 0
        return flops.Tower(
            width=width,
            weights=layers * block + width * 3 * flops.size(vision, "patch_size") ** 2,
            full_layers=layers,
            merger_weights=merger + width * out + out**2,
            patches_per_token=merge**2,
        )


def _images(media: Media) -> list[Tensor]:
    """(3, H, W) pixels of each image."""
    side = patch_side(media.pixel_values)
    rows = media.pixel_values.split([t * h * w for t, h, w in media.grid_thw])
    return [
        tiles_of(part, h, w, side)[0] for part, (_, h, w) in zip(rows, media.grid_thw, strict=True)
    ]


def _refuse_other_features(config: Mapping[str, Any]) -> None:
    """Features of another layer leave later ones without gradients; a first patch cut off is that
    of a tower with a class token, which Pixtral's has not."""
    layer = config.get("vision_feature_layer", -1)
    if layer != -1:
        raise CapabilityError(
            f"config.json: vision_feature_layer is {layer}; with Pixtral's tower only the features "
            f"of the last layer, -1, are served"
        )
    strategy = config.get("vision_feature_select_strategy", "full")
    if strategy != "full":
        raise CapabilityError(
            f"config.json: vision_feature_select_strategy is {strategy!r}, which drops a patch of "
            "the first image of a batch. Pixtral's tower has no class token, so expected 'full'"
        )


def _bounded(rule: PixtralImageRule, budget: ImagesSection) -> PixtralImageRule:
    """The rule with edges whose square keeps the budget.

    Raises:
        CapabilityError: less than a token's patch.
    """
    if budget.max_pixels is None:
        return rule
    side = rule.token_size
    edge = math.isqrt(budget.max_pixels) // side * side
    if not edge:
        raise CapabilityError(
            f"images.max_pixels: {budget.max_pixels} is less than the patch of one token, {side} x "
            f"{side} = {side**2} pixels; use {side**2} or more"
        )
    return replace(rule, max_width=edge, max_height=edge)


LLAVA = Pixtral(name="llava", model_types=("llava",), merges=False)
"""LLaVA's class with Pixtral's tower: Pixtral 12B, a token for each patch."""


MISTRAL3 = Pixtral(name="mistral3", model_types=("mistral3",), merges=True)
"""Mistral Small 3.1 and later with images: Pixtral's tower, 2 x 2 patches merged into a token."""
