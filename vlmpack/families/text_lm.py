"""Language models without a vision tower: Qwen2, Qwen3 and Llama, dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import NO_TOKEN, ImageFeatures, ModulePaths, PixelBudget
from vlmpack.packing import CostModel, GridTHW, Media


@dataclass(frozen=True, kw_only=True)
class TextLM:
    """A family without images; see `vlmpack.families.Family`."""

    name: str
    model_types: tuple[str, ...]
    modules: ModulePaths
    num_position_axes: int = 1
    rule_version: int = 1
    pixel_knobs: tuple[str, ...] = ()

    def placeholder(self, tokenizer: Any) -> int:
        """No token stands for an image, whatever the vocabulary has: that of Qwen2.5 holds
        <|image_pad|> in its text models too."""
        return NO_TOKEN

    def marker(self, tokenizer: Any) -> str:
        """None is written."""
        return ""

    def image_rule(self, folder: Path, budget: PixelBudget) -> None:
        """None: there is nothing to show it to."""

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Not asked for: `Encoder` refuses images."""
        raise CapabilityError("a language model takes no images")

    def token_arguments(self, is_image: Tensor) -> dict[str, Tensor]:
        """Ids are enough."""
        return {}

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """Not asked for: `Encoder` refuses images."""
        raise CapabilityError("a language model takes no images")

    def auto_class(self) -> Any:
        """A decoder with its head."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def positions(
        self, num_tokens: int, media_starts: Sequence[int], media: Sequence[GridTHW]
    ) -> Tensor:
        """(1, s): 0, 1, 2 ... from the start of each sample."""
        return torch.arange(num_tokens)[None]

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """The decoder's."""
        return flops.cost_model(config)


FAMILY = TextLM(
    name="text_lm",
    model_types=("llama", "qwen2", "qwen3"),
    modules=ModulePaths(vision=None, projectors=(), language="model"),
)
