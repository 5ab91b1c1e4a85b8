"""The language models of Qwen3.5, dense and mixture of experts, without their tower; see `qwen3_5`.

The class counts positions along one axis for all three of its rotary ones, as MRoPE does for text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmpack.families import flops
from vlmpack.families.configs import whole_config
from vlmpack.families.flops import qwen3_5_decoder
from vlmpack.families.text_lm import TextLM
from vlmpack.packing import CostModel


class Qwen3_5Text(TextLM):  # noqa: N801 - as it is called
    """See `vlmpack.families.Family`."""

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """A decoder of two kinds of layers."""
        whole = whole_config(config)
        return flops.cost_model(whole, decoder=qwen3_5_decoder(whole))


FAMILY = Qwen3_5Text(name="qwen3_5_text", model_types=("qwen3_5_text", "qwen3_5_moe_text"))
