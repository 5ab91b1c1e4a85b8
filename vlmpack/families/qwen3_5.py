"""Qwen3.5, dense and mixture of experts, with its tower; Qwen3.6 and 3.8 are the same architecture.

Three of four layers of the decoder are GatedDeltaNet: a short convolution and a delta rule, whose
state runs from token to token (`vlmpack/recurrence`). The others are full attention, with a gate on
its output and rotary positions on a quarter of each head. The tower is that of Qwen3-VL without
DeepStack; positions are MRoPE, its axes interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmpack.families import flops
from vlmpack.families.configs import whole_config
from vlmpack.families.flops import qwen3_5_decoder
from vlmpack.families.qwen_video import WRAPPED, VolumeBoundRule
from vlmpack.families.qwen_vl import QwenVL
from vlmpack.packing import CostModel


class Qwen3_5(QwenVL):  # noqa: N801 - as it is called
    """See `vlmpack.families.Family`."""

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """A decoder of two kinds of layers, and the tower."""
        whole = whole_config(config)
        decoder = qwen3_5_decoder(whole["text_config"])
        return flops.cost_model(whole, self.tower(whole), decoder)


FAMILY = Qwen3_5(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_moe"),
    video_kind=VolumeBoundRule,
    video_wrapped=WRAPPED,
    frames_apart=True,
)
