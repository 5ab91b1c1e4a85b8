"""Qwen3-VL and its mixture of experts: DeepStack, interleaved MRoPE, norms on queries and keys.

DeepStack (2406.04334): the tower returns features of some of its inner blocks too, each through a
merger of its own; the decoder adds them to the hidden states of its first layers at the
placeholders.

Mixture of experts: a token's experts and their weights follow from its own hidden state alone, so
packing changes nothing. The hf engine adds no auxiliary (load-balancing) loss: transformers adds
one inside the forward of the whole model and only with `output_router_logits`, and it mixes the
tokens of a batch, which would make the loss of a sample depend on the samples beside it. The mcore
engine has one, off by default.
"""

from vlmpack.families.base import ModulePaths
from vlmpack.families.qwen_video import WRAPPED, VolumeBoundRule
from vlmpack.families.qwen_vl import QwenVL

FAMILY = QwenVL(
    name="qwen3_vl",
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    video_kind=VolumeBoundRule,
    video_wrapped=WRAPPED,
    frames_apart=True,
    modules=ModulePaths(
        vision="model.visual",
        projectors=("model.visual.merger", "model.visual.deepstack_merger_list"),
        language="model.language_model",
        deep_features=True,
    ),
)
