"""Gemma 4's images: a budget of tokens, filled at the image's own shape.

With k patches averaged along each side of a token and patches of p pixels, an image of w x h pixels
is scaled by sqrt(budget * k^2 p^2 / (w h)), so that it would have as many tokens as the budget, and
both sides are rounded down to multiples of k p; a side that would be 0 becomes one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from PIL.Image import Image
from torch import Tensor

from vlmpack.errors import CapabilityError
from vlmpack.families.base import ImageLayout
from vlmpack.families.image_processor import ProcessorRule, media_of
from vlmpack.families.tiles import patch_side
from vlmpack.packing import Media

START, SOFT, END = "<|image>", "<|image|>", "<image|>"

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""The budgets that transformers' Gemma 4 image processor takes."""


Rule = TypeVar("Rule", bound="Gemma4ImageRule")


@dataclass(frozen=True)
class Gemma4ImageRule(ProcessorRule):
    """Resize to fill a budget of tokens.

    Args:
        patch: side of a patch in pixels.
        pool: patches along each side of a token.
        tokens: the budget.
        blocks: whether the tokens of an image attend to one another in both directions.
    """

    patch: int
    pool: int
    tokens: int
    blocks: bool = False

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """One run of placeholders between two tokens; `get_aspect_ratio_preserving_size` of
        transformers' Gemma 4 files."""
        return self._layout(*self._tokens(width, height))

    def _tokens(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
        side = self.pool * self.patch
        scale = math.sqrt(self.tokens * side**2 / (height * width))
        rows, columns = (math.floor(scale * edge / side) for edge in (height, width))
        if not rows and not columns:
            raise ValueError(
                f"an image of {width} x {height} pixels has no token left in a budget of "
                f"{self.tokens}; this family's processor refuses it"
            )
        if not rows:
            rows, columns = 1, min(width // height, self.tokens)
        elif not columns:
            rows, columns = min(height // width, self.tokens), 1
        if rows * columns > self.tokens:
            raise ValueError(
                f"an image of {width} x {height} pixels would have {rows} x {columns} tokens, more "
                f"than the budget of {self.tokens}; this family's processor refuses it"
            )
        return rows, columns

    def _layout(self, rows: int, columns: int) -> ImageLayout:
        return ImageLayout(
            grid=(1, rows * self.pool, columns * self.pool),
            text=f"{START}{SOFT}{END}",
            runs=(rows * columns,),
        )

    def preprocess(self, images: Sequence[Image]) -> Media:
        """transformers' own image processor (the PIL one where torchvision is absent), its padding
        to the budget taken away again."""
        features = self.processor(images=list(images), return_tensors="pt")
        layouts = [self.layout(*image.size) for image in images]
        rows = [
            patches[: math.prod(layout.grid)]
            for patches, layout in zip(features["pixel_values"], layouts, strict=True)
        ]
        return self._media(torch.cat(rows), layouts)

    def smallest(self) -> Media:
        """One token's worth of zeros."""
        layout = self._layout(1, 1)
        return self._media(torch.zeros(self.pool**2, 3 * self.patch**2), [layout])

    def _media(self, rows: Tensor, layouts: Sequence[ImageLayout]) -> Media:
        media = media_of(rows, layouts)
        if not self.blocks:
            return media
        return replace(media, blocks=tuple(layout.runs for layout in layouts))

    def settings(self) -> dict[str, Any]:
        """The budget."""
        return {"max_soft_tokens": self.tokens}

    def pictures(self, media: Media) -> list[Image]:
        """Patches put back in their places; a patch holds its pixels with the channels last."""
        side = patch_side(media.pixel_values)
        counts = [t * h * w for t, h, w in media.grid_thw]
        return [
            self.shown(
                patches.reshape(h, w, side, side, 3).permute(4, 0, 2, 1, 3).reshape(3, h * side, -1)
            )
            for patches, (_, h, w) in zip(
                media.pixel_values.split(counts), media.grid_thw, strict=True
            )
        ]


def bounded(rule: Rule, max_pixels: int | None) -> Rule:
    """The rule with the largest budget within an area.

    Args:
        rule: with the budget that the folder's processor has, which the area may exceed.
        max_pixels: most pixels of a resized image; None leaves the rule as it is.

    Raises:
        CapabilityError: less than the smallest budget.
    """
    if max_pixels is None:
        return rule
    area = (rule.pool * rule.patch) ** 2
    fitting = [tokens for tokens in SOFT_TOKENS if tokens * area <= max_pixels]
    if not fitting:
        raise CapabilityError(
            f"images.max_pixels: {max_pixels} is less than {SOFT_TOKENS[0]} tokens of {area} "
            f"pixels, the smallest budget of this family's processor; use "
            f"{SOFT_TOKENS[0] * area} or more"
        )
    return replace(rule, tokens=fitting[-1])


def padded_patches(media: Media) -> tuple[Tensor, Tensor]:
    """All images of a batch, and frames of videos, as the tower takes them, each padded to the
    largest.

    Returns:
        (I, P, 3 * side * side) patches, zeros behind an image's own; (I, P, 2) int64 (x, y) of each
        in patches, -1 there. P is that of the largest image, where transformers' processor has that
        of the budget.
    """
    grids = [(h, w) for t, h, w in media.grid_thw for _ in range(t)]
    counts = [h * w for h, w in grids]
    device = media.pixel_values.device
    rows = media.pixel_values.split(counts)
    pixels = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    places = torch.full((len(counts), max(counts), 2), -1)
    for place, (h, w), count in zip(places, grids, counts, strict=True):
        place[:count] = places_of(h, w)
    return pixels, places.to(device, non_blocking=True)


def places_of(rows: int, columns: int) -> Tensor:
    """(rows * columns, 2) int64 (x, y) of the patches of an image."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
