"""Language models without a vision tower: decoders with attention, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import NO_TOKEN, Family, ImageFeatures, ModulePaths
from vlmpack.families.configs import whole_config
from vlmpack.families.flops import nemotron_h_decoder, qwen3_5_decoder
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


class NemotronH(TextLM):
    """See `vlmpack.families.Family`."""

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """A decoder of four kinds of layers."""
        whole = whole_config(config)
        return flops.cost_model(whole, decoder=nemotron_h_decoder(whole))


NEMOTRON_H = NemotronH(name="nemotron_h", model_types=("nemotron_h",))
"""Nemotron-H, a language model: a layer is a Mamba-2, attention, an MLP, or a mixture of experts.

Mamba-2 has a short convolution and a scan whose state runs from token to token
(`vlmpack/recurrence`). Attention has no rotary positions. Order comes from the causal scans, so
positions of a sample play no part.

A token's experts follow from its own hidden state and a bias that training leaves as it is.
"""


class Qwen3_5Text(TextLM):  # noqa: N801 - as it is called
    """See `vlmpack.families.Family`."""

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """A decoder of two kinds of layers."""
        whole = whole_config(config)
        return flops.cost_model(whole, decoder=qwen3_5_decoder(whole))


QWEN3_5_TEXT = Qwen3_5Text(name="qwen3_5_text", model_types=("qwen3_5_text", "qwen3_5_moe_text"))
"""The language models of Qwen3.5, dense and mixture of experts, without their tower.

The class counts positions along one axis for all three of its rotary ones, as MRoPE does for text.
"""
