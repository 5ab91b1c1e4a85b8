"""What the shared code asks of a model family. A family file answers; nobody else says its name.

Everything here runs on CPU, in data workers too: no model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image
from torch import Tensor

from vlmpack.packing import CostModel, GridTHW, Media

NO_TOKEN = -1
"""An id that no token has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePaths:
    """Attribute paths inside the family's transformers model.

    Args:
        vision: the vision tower; called as `tower(pixel_values, grid_thw=...)`. None for a language
            model alone.
        projectors: what maps the tower's width to the language model's; may lie inside `vision`.
        language: the decoder without the head; called with `inputs_embeds`.
        deep_features: True where the tower's output has `deepstack_features` too, one (M, D) tensor
            for each of the decoder's first layers, which the decoder takes as
            `deepstack_visual_embeds` beside `visual_pos_masks`.
    """

    vision: str | None
    projectors: tuple[str, ...]
    language: str
    deep_features: bool = False


class ImageRule(Protocol):
    """How one family turns images into patches and placeholder tokens."""

    def grid(self, width: int, height: int) -> GridTHW:
        """Patches along (t, h, w) for an image of that size in pixels; no decoding.

        Raises:
            ValueError: a size the family refuses (an extreme aspect ratio, say).
        """
        ...

    def num_tokens(self, grid: GridTHW) -> int:
        """Placeholder tokens that the image costs."""
        ...

    def preprocess(self, images: Sequence[Image]) -> Media:
        """Pixels of RGB images, in order, with their grids and token counts."""
        ...

    def smallest(self) -> Media:
        """A blank image of the smallest size: keeps ranks without images in the collectives."""
        ...

    def pictures(self, media: Media) -> list[Image]:
        """The RGB images that `preprocess` made patches of: resized, normalisation undone."""
        ...


class Family(Protocol):
    """One model family, said once."""

    name: str
    model_types: tuple[str, ...]
    """`model_type` values of config.json that this family serves."""
    modules: ModulePaths
    num_position_axes: int
    """1, or 3 where positions are MRoPE (temporal, height, width)."""
    rule_version: int
    """Raise it when a length or a position changes: it enters the fingerprint of lengths."""

    def placeholder(self, tokenizer: _TokenIds) -> int:
        """Id of the token that one image feature replaces; NO_TOKEN without a tower."""
        ...

    def image_rule(self, folder: Path) -> ImageRule | None:
        """The rule for the processor files of a model folder; None without a tower."""
        ...

    def auto_class(self) -> Any:
        """The Auto class of transformers that loads the model with its head."""
        ...

    def positions(
        self, num_tokens: int, media_starts: Sequence[int], media: Sequence[GridTHW]
    ) -> Tensor:
        """(A, s) int64 positions of one sample.

        Args:
            num_tokens: s, placeholders expanded.
            media_starts: index of each image's first placeholder.
            media: each image's grid.
        """
        ...

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """FLOPs of a training step by tokens and patches.

        Args:
            config: the content of the model's config.json.

        Raises:
            ModelError: a size is missing from it.
        """
        ...


class _TokenIds(Protocol):
    def convert_tokens_to_ids(self, tokens: str) -> int: ...
