"""Idefics3 and SmolVLM: an image in rows and columns of tiles.

An image is enlarged to whole tiles and cut into them. One more tile shows it as a whole. A token is
made of scale x scale patches.

    <fake_token_around_image><row_1_col_1><image>...<fake_token_around_image><row_1_col_2><image>...
    \\n\\n<fake_token_around_image><global-img><image>...<fake_token_around_image>
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import ImageFeatures, ImageLayout, ModulePaths
from vlmpack.families.configs import whole_config_of
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.image_processor import ProcessorRule, blank, family_processor, media_of
from vlmpack.families.tiles import canvas_of, patch_rows, stacked_tiles, tiles_by_image
from vlmpack.packing import Media
from vlmpack.recipe.data import ImagesSection

IMAGE_TOKEN = "<image>"
AROUND = "<fake_token_around_image>"
WHOLE = f"{AROUND}<global-img>{IMAGE_TOKEN}{AROUND}"

LARGEST_EDGE = 4096
"""`MAX_IMAGE_SIZE` of the image processor: bounds the resized image before it is cut."""


@dataclass(frozen=True)
class Idefics3ImageRule(ProcessorRule):
    """Resize so that the longest edge has a fixed length, round both up to whole tiles, cut.

    Args:
        tile_size: side of a tile in pixels. The tower does not see what exceeds whole patches.
    """

    patch_size: int
    scale_factor: int
    tile_size: int
    longest_edge: int
    splits: bool

    @property
    def side(self) -> int:
        """Patches along a tile's side."""
        return self.tile_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        """Feature tokens of a tile."""
        return (self.side // self.scale_factor) ** 2

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """One run of placeholders a tile, the whole image last."""
        rows, columns = self.rows_and_columns(width, height)
        tiles = rows * columns + 1
        return ImageLayout(
            grid=(tiles, self.side, self.side),
            text=_written(rows, columns),
            runs=(self.tokens_per_tile,) * tiles,
        )

    def rows_and_columns(self, width: int, height: int) -> tuple[int, int]:
        """Tiles in addition to the whole image; (0, 0) where that is all.

        The rules are `resize`, `resize_for_vision_encoder` and `split_images` of transformers'
        image processor.
        """
        if not self.splits:
            return 0, 0
        width, height = _below(*_longest(width, height, self.longest_edge), LARGEST_EDGE)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.tile_size)
            rows = math.ceil(int(columns * self.tile_size / ratio) / self.tile_size)
        else:
            rows = math.ceil(height / self.tile_size)
            columns = math.ceil(int(rows * self.tile_size * ratio) / self.tile_size)
        return (0, 0) if rows == columns == 1 else (rows, columns)

    def preprocess(self, images: Sequence[Image]) -> Media:
        """transformers' own image processor (the PIL one where torchvision is missing)."""
        features = self.processor(images=list(images), return_tensors="pt")
        seen = self.side * self.patch_size
        tiles = features["pixel_values"][0, :, :, :seen, :seen]
        layouts = [self.layout(*image.size) for image in images]
        assert tiles.shape[0] == sum(layout.grid[0] for layout in layouts)
        return media_of(
            patch_rows(tiles, self.patch_size), layouts, [image.size for image in images]
        )

    def smallest(self) -> Media:
        """One tile of zeros."""
        grid = (1, self.side, self.side)
        layout = ImageLayout(grid=grid, text=WHOLE, runs=(self.tokens_per_tile,))
        return blank(layout, 3 * self.patch_size**2, (self.tile_size, self.tile_size))

    def settings(self) -> dict[str, Any]:
        """The length of the longest edge."""
        return {"size": {"longest_edge": self.longest_edge}}

    def pictures(self, media: Media) -> list[Image]:
        """The tiles put together; the last one shows the same once more and is left out."""
        assert media.image_sizes is not None
        shown = []
        for size, image in zip(media.image_sizes, tiles_by_image(media), strict=True):
            rows, columns = self.rows_and_columns(*size)
            shown.append(self.shown(canvas_of(image[:-1], rows, columns) if rows else image[0]))
        return shown


@dataclass(frozen=True, kw_only=True)
class Idefics3(ImageFamily):
    """The family; see `vlmpack.families.Family`."""

    image_token: str = IMAGE_TOKEN
    pixel_knobs: tuple[str, ...] = ("max_tiles",)

    def image_rule(self, folder: Path, budget: ImagesSection) -> Idefics3ImageRule:
        """The rule with the sizes of the folder's image processor and tower."""
        processor = family_processor(folder, "Idefics3ImageProcessor", "SmolVLMImageProcessor")
        config = whole_config_of(folder)
        longest = processor.size.get("longest_edge")
        if not longest:
            raise ValueError(f"size is {dict(processor.size)}, expected a longest_edge")
        rule = Idefics3ImageRule(
            folder=folder,
            patch_size=flops.size(config["vision_config"], "patch_size"),
            scale_factor=flops.size(config, "scale_factor"),
            tile_size=processor.max_image_size["longest_edge"],
            longest_edge=longest,
            splits=bool(processor.do_image_splitting),
        )
        if rule.side < 1 or rule.side % rule.scale_factor:
            raise ValueError(
                f"a tile of {rule.tile_size} pixels (max_image_size) has {rule.side} patches of "
                f"{rule.patch_size} along its side, expected a multiple of the model's "
                f"scale_factor, {rule.scale_factor}"
            )
        return _bounded(rule, budget)

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """All tiles as those of one sample. No mask: tiles are full."""
        return {"pixel_values": stacked_tiles(media)[None]}

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """The tower's parts and the connector: `get_image_features` reads on the host which tiles
        are padding, drops a blank one, and has the tower look for padding in its mask."""
        assert self.modules.vision is not None
        tower = model.get_submodule(self.modules.vision)
        tiles = stacked_tiles(media)
        side = tiles.shape[-1] // tower.patch_size
        real = torch.ones(tiles.shape[0], side, side, dtype=torch.bool, device=tiles.device)
        embeds = tower.embeddings(pixel_values=tiles, patch_attention_mask=real)
        hidden = tower.post_layernorm(tower.encoder(inputs_embeds=embeds).last_hidden_state)
        features = model.get_submodule(self.modules.projectors[0])(hidden)
        return ImageFeatures(features.flatten(0, 1))

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """A tile is to the tower what a window is to others."""
        vision, scale = config["vision_config"], flops.size(config, "scale_factor")
        out = flops.size(config["text_config"], "hidden_size")
        return flops.tiled_tower(
            vision,
            merger_weights=flops.size(vision, "hidden_size") * scale**2 * out,
            patches_per_token=scale**2,
        )


def _longest(width: int, height: int, edge: int) -> tuple[int, int]:
    """Width and height with the longer of them `edge`, the other one even."""
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        width, height = int(edge * ratio), edge
        width += width % 2
    return max(width, 1), max(height, 1)


def _below(width: int, height: int, edge: int) -> tuple[int, int]:
    """Width and height with neither above `edge`."""
    ratio = width / height
    if width >= height and width > edge:
        width, height = edge, int(edge / ratio)
    elif height > width and height > edge:
        width, height = int(edge * ratio), edge
    return max(width, 1), max(height, 1)


def _written(rows: int, columns: int) -> str:
    """An image in the conversation; as `replace_image_token` of the processor classes."""
    if not rows:
        return WHOLE
    lines = [
        "".join(
            f"{AROUND}<row_{row + 1}_col_{column + 1}>{IMAGE_TOKEN}" for column in range(columns)
        )
        for row in range(rows)
    ]
    return "\n".join([*lines, "", WHOLE])


def _bounded(rule: Idefics3ImageRule, budget: ImagesSection) -> Idefics3ImageRule:
    """The rule with n tiles along the longest edge, so that n x n keeps the budget.

    The whole image's own tile is not counted.

    Raises:
        CapabilityError: a bound on the tiles of a processor that cuts none.
    """
    if budget.max_tiles is None:
        return rule
    if not rule.splits:
        raise CapabilityError(
            f"images.max_tiles: {budget.max_tiles}, but this model's processor cuts no tiles "
            f"(do_image_splitting is false); leave it out"
        )
    edge = math.isqrt(budget.max_tiles) * rule.tile_size
    return replace(rule, longest_edge=edge - edge % 2)  # the shorter edge is rounded up to even


FAMILY = Idefics3(
    name="idefics3",
    model_types=("idefics3", "smolvlm"),
    modules=ModulePaths(
        vision="model.vision_model",
        projectors=("model.connector",),
        language="model.text_model",
    ),
)
