"""Where the host waits for the device in an optimizer step: once, to read what the step came to.

The list of third-party code is of the versions in constraints.txt, and by line on purpose: another
line of the same file is another wait, which somebody has to look at.
"""

from __future__ import annotations

OURS = ("a list", "vlmpack/training/step.py")
"""What `Stepper.train` reads: sums, counts and the gradient's norm in one tensor."""

_GRIDS = "the stock tower counts patches by the images' grids, which it is given on the device"
_LENGTHS = "the stock tower splits patches by image or window in every block"
_ORDER = "the stock tower makes the order of windows on the host and moves it"
_DEEP = "the stock decoder adds deep features through a mask"
_PADDING = "the stock tower's patches are padded: it asks whether any are, and takes those out"

THIRD_PARTY: dict[str, str] = {
    "transformers/vision_utils.py:64": _GRIDS,
    "transformers/vision_utils.py:109": _GRIDS,
    "transformers/vision_utils.py:112": _GRIDS,
    "transformers/vision_utils.py:161": _GRIDS,
    "transformers/vision_utils.py:186": _ORDER,
    "transformers/vision_utils.py:187": _ORDER,
    "transformers/vision_utils.py:276": _GRIDS,
    "transformers/vision_utils.py:277": _GRIDS,
    "transformers/vision_utils.py:278": _GRIDS,
    "transformers/vision_utils.py:280": _GRIDS,
    "transformers/models/qwen2_vl/modeling_qwen2_vl.py:403": _LENGTHS,
    "transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py:313": _LENGTHS,
    "transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py:420": _ORDER,
    "transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py:480": _ORDER,
    "transformers/models/qwen3_vl/modeling_qwen3_vl.py:299": _LENGTHS,
    "transformers/models/qwen3_vl/modeling_qwen3_vl.py:841": _DEEP,
    "transformers/models/qwen3_vl/modeling_qwen3_vl.py:842": _DEEP,
    "transformers/models/qwen3_vl_moe/modeling_qwen3_vl_moe.py:533": _LENGTHS,
    "transformers/models/qwen3_vl_moe/modeling_qwen3_vl_moe.py:938": _DEEP,
    "transformers/models/qwen3_vl_moe/modeling_qwen3_vl_moe.py:939": _DEEP,
    "transformers/models/qwen3_5/modeling_qwen3_5.py:1063": _LENGTHS,
    "transformers/models/qwen3_5_moe/modeling_qwen3_5_moe.py:1152": _LENGTHS,
    "transformers/masking_utils.py:369": _PADDING,
    "transformers/models/gemma4/modeling_gemma4.py:2112": _PADDING,
}
"""By place, why."""

BACKWARD = {
    "qwen2_5_vl": {"a copy to the device": _ORDER},
    "qwen3_vl": {"how many a mask selects": _DEEP},
    "qwen3_vl_moe": {"how many a mask selects": _DEEP},
}
"""By family, what autograd itself waits for there, and why."""
