"""Qwen2.5-VL: windowed vision tower, 2 x 2 spatial merge, MRoPE in the language model; a video's
times are in its positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vlmpack.families.qwen_vl import QwenVL

TOKENS_PER_SECOND = 4
"""What transformers' config class has where config.json says nothing."""


class Qwen2_5VL(QwenVL):  # noqa: N801 - as it is called
    """See `vlmpack.families.Family`."""

    def configured(self, config: Mapping[str, Any]) -> Qwen2_5VL:
        """With the positions of a second of video."""
        vision = config.get("vision_config")
        found = vision.get("tokens_per_second") if isinstance(vision, Mapping) else None
        return replace(self, tokens_per_second=TOKENS_PER_SECOND if found is None else found)


FAMILY = Qwen2_5VL(name="qwen2_5_vl", model_types=("qwen2_5_vl",), gated_tower=True)
