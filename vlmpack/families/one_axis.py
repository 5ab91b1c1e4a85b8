"""What families have in common whose decoder counts plain positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmpack.families.base import ModulePaths
from vlmpack.packing import GridTHW


@dataclass(frozen=True, kw_only=True)
class OneAxis:
    """Part of a family; see `vlmpack.families.Family`."""

    name: str
    model_types: tuple[str, ...]
    modules: ModulePaths
    num_position_axes: int = 1
    rule_version: int = 1
    pixel_knobs: tuple[str, ...] = ()

    def token_arguments(self, is_image: Tensor) -> dict[str, Tensor]:
        """Ids are enough."""
        return {}

    def positions(
        self, num_tokens: int, media_starts: Sequence[int], media: Sequence[GridTHW]
    ) -> Tensor:
        """(1, s): 0, 1, 2 ... from the start of each sample; image tokens count as text does."""
        return torch.arange(num_tokens)[None]


@dataclass(frozen=True, kw_only=True)
class OneAxisVLM(OneAxis):
    """Part of a family with images."""

    def auto_class(self) -> Any:
        """A whole vision-language model."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText
