"""Language models without a vision tower: decoders with attention, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import NO_TOKEN, Family, ImageFeatures, ModulePaths
from vlmpack.packing import CostModel, Media
from vlmpack.recipe.data import ImagesSection

DECODER = ModulePaths(vision=None, projectors=(), language="model")


@dataclass(frozen=True, kw_only=True)
class TextLM(Family):
    """A family without images; see `vlmpack.families.Family`."""

    modules: ModulePaths = DECODER

    def placeholder(self, tokenizer: Any) -> int:
        """No token stands for an image, whatever the vocabulary has: that of Qwen2.5 holds
        <|image_pad|> in its text models too."""
        return NO_TOKEN

    def marker(self, tokenizer: Any) -> str:
        """The template writes none."""
        return ""

    def image_rule(self, folder: Path, budget: ImagesSection) -> None:
        """None: there is nothing to show it to."""

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Not asked for: `Encoder` refuses images."""
        raise CapabilityError("a language model takes no images")

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """Not asked for: `Encoder` refuses images."""
        raise CapabilityError("a language model takes no images")

    def auto_class(self) -> Any:
        """A decoder with its head."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """The costs of the decoder alone."""
        return flops.cost_model(config)


FAMILY = TextLM(
    name="text_lm",
    model_types=(
        *("llama", "qwen2", "qwen3"),
        *("glm4_moe", "glm4_moe_lite", "deepseek_v3"),
    ),
)
