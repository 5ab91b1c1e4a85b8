"""Qwen2-VL: unwindowed vision tower, 2 x 2 spatial merge, MRoPE in the language model."""

from vlmpack.families.qwen_vl import QwenVL

FAMILY = QwenVL(name="qwen2_vl", model_types=("qwen2_vl",))
