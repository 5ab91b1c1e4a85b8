"""Gemma 3's language model alone: layers with a sliding window and with full attention, each with a
rotary base of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmpack.families import flops
from vlmpack.families.configs import final_logit_cap, whole_config
from vlmpack.families.text_lm import TextLM
from vlmpack.packing import CostModel


@dataclass(frozen=True, kw_only=True)
class Gemma3Text(TextLM):
    """The family; see `vlmpack.families.Family`."""

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        """What the file says."""
        return final_logit_cap(config)

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """The decoder's; published files leave sizes out. Layers with a sliding window are priced
        as the others."""
        return flops.cost_model(whole_config(config))


FAMILY = Gemma3Text(name="gemma3_text", model_types=("gemma3_text",))
