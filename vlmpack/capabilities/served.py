"""Every model_type that can be trained, one line each.

A line is both the registration and the row of the capability table, so the two cannot differ. The
table lies below the recipe and apart from the families' files, because a recipe is checked where
torch is not imported. A family's own limits stand only in its line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from vlmpack.capabilities.limits import (
    NOT_ON_MCORE,
    ONLY_ON_MCORE,
    Engine,
    Feature,
    Limit,
    OnlyAttention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model_type that can be trained.

    Args:
        family: the file in `vlmpack/families` whose `FAMILY` serves it, or `file:VALUE` where the
            file holds several.
        engines: what runs it. A model_type with `mcore` has an entry in
            `vlmpack/backends/mcore/weights/__init__.py` too.
        decoders: tested values of `text_config.model_type`, where the class takes any language
            model; empty for no check.
        towers: tested values of `vision_config.model_type`, where the class takes any tower; empty
            for no check.
        limits: features that it cannot have, on any engine.
        whole_tiles: whether an image is enlarged to fill whole tiles, or a budget, whatever its
            size. Resizing it beforehand loses detail but saves no tokens.
        pixel_knobs: the keys of `images` in a recipe that the family's images can be bounded by.
        prediction: where published files have layers of multi-token prediction, which transformers
            skips; empty for nowhere.
        bent_logits: whether its class bends logits by `final_logit_softcapping`, and we do too.
        layers: kinds of layers besides attention, as config.json names them, that are tested.
        unshared: why its rows cannot share prefixes; None where they can.
        off_mcore: why megatron-core's layers do not fit, where that is known; empty where nobody
            has mapped its weights.
    """

    title: str
    family: str
    engines: tuple[Engine, ...] = ("hf",)
    has_experts: bool = False
    decoders: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    attention: OnlyAttention | None = None
    limits: Mapping[Feature, Limit] = field(default_factory=dict)
    whole_tiles: bool = False
    pixel_knobs: tuple[str, ...] = ()
    prediction: str = ""
    bent_logits: bool = False
    layers: tuple[str, ...] = ()
    unshared: str | None = None
    off_mcore: str = ""

    @property
    def not_on_mcore(self) -> Limit:
        """Why megatron-core does not run it."""
        return replace(NOT_ON_MCORE, reason=self.off_mcore) if self.off_mcore else NOT_ON_MCORE

    @property
    def only_on_mcore(self) -> Limit:
        """Why nothing does what megatron-core alone can do."""
        return replace(ONLY_ON_MCORE, reason=self.off_mcore) if self.off_mcore else ONLY_ON_MCORE


_STATE = "its layers that carry state from token to token cannot hand it to several branches"
_BLOCKS = "its image tokens attend in both directions, which shared prefixes do not support yet"
_BOTH_WAYS = "an image's tokens attend in both directions, which only segments does"
_OWN_OF_ROWS = "its per-layer inputs and image blocks are each row's own, which no graph holds yet"
_OTHER_LAYERS = (
    "has layers that megatron-core's are not: heads of two sizes, sliding windows, norms "
    "behind attention and MLP too, and inputs, keys and values that layers share"
)
_BOTH: tuple[Engine, ...] = ("hf", "mcore")

_text = partial(ServedModel, family="text_lm", engines=_BOTH)
_experts = partial(ServedModel, family="text_lm", has_experts=True)
_qwen_vl = partial(ServedModel, engines=_BOTH, pixel_knobs=("min_pixels", "max_pixels"))
_tiled = partial(ServedModel, whole_tiles=True, pixel_knobs=("max_tiles",))
_qwen3_5 = partial(
    ServedModel,
    engines=_BOTH,
    layers=("linear_attention",),
    prediction="mtp",
    unshared=_STATE,
)
_nemotron = partial(
    ServedModel,
    has_experts=True,
    layers=("linear_attention", "mamba", "mlp", "moe"),
    unshared=_STATE,
)
_pixtral = partial(ServedModel, towers=("pixtral",), pixel_knobs=("max_pixels",))
_gemma4 = partial(
    ServedModel,
    has_experts=True,
    limits={"CUDA graphs": Limit(_OWN_OF_ROWS)},
    bent_logits=True,
    off_mcore=_OTHER_LAYERS,
)

SERVED: Mapping[str, ServedModel] = {
    "llama": _text(title="Llama"),
    "qwen2": _text(title="Qwen2"),
    "qwen3": _text(title="Qwen3"),
    "qwen2_vl": _qwen_vl(title="Qwen2-VL", family="qwen_vl:QWEN2_VL"),
    "qwen2_5_vl": _qwen_vl(title="Qwen2.5-VL", family="qwen_vl:QWEN2_5_VL"),
    "qwen3_vl": _qwen_vl(title="Qwen3-VL", family="qwen_vl:QWEN3_VL"),
    "qwen3_vl_moe": _qwen_vl(title="Qwen3-VL-MoE", family="qwen_vl:QWEN3_VL", has_experts=True),
    "qwen3_5": _qwen3_5(
        title="Qwen3.5", family="qwen_vl:QWEN3_5", pixel_knobs=("min_pixels", "max_pixels")
    ),
    "qwen3_5_moe": _qwen3_5(
        title="Qwen3.5-MoE",
        family="qwen_vl:QWEN3_5",
        has_experts=True,
        pixel_knobs=("min_pixels", "max_pixels"),
    ),
    "qwen3_5_text": _qwen3_5(title="Qwen3.5 (text)", family="text_lm:QWEN3_5_TEXT"),
    "qwen3_5_moe_text": _qwen3_5(
        title="Qwen3.5-MoE (text)", family="text_lm:QWEN3_5_TEXT", has_experts=True
    ),
    "nemotron_h": _nemotron(
        title="Nemotron-H", family="text_lm:NEMOTRON_H", engines=_BOTH, prediction="mtp"
    ),
    "nemotron_h_omni": _nemotron(
        title="Nemotron Omni (images)",
        family="nemotron_omni",
        engines=_BOTH,
        decoders=("nemotron_h",),
        pixel_knobs=("min_pixels", "max_pixels"),
    ),
    "internvl": _tiled(title="InternVL", family="internvl", decoders=("qwen2", "qwen3", "llama")),
    "llava_onevision": ServedModel(
        title="LLaVA-OneVision", family="llava_onevision", decoders=("qwen2",)
    ),
    "idefics3": _tiled(title="Idefics3", family="idefics3", decoders=("llama",)),
    "smolvlm": _tiled(title="SmolVLM", family="idefics3", decoders=("llama",)),
    "mistral3": _pixtral(
        title="Mistral 3", family="pixtral:MISTRAL3", decoders=("mistral", "ministral3")
    ),
    "llava": _pixtral(title="Pixtral", family="pixtral:LLAVA", decoders=("mistral",)),
    "gemma3": _tiled(
        title="Gemma 3",
        family="gemma3",
        decoders=("gemma3_text",),
        attention=OnlyAttention(("segments",), _BOTH_WAYS),
        limits={"CUDA graphs": Limit(_BOTH_WAYS)},
        unshared=_BLOCKS,
    ),
    "gemma3_text": ServedModel(
        title="Gemma 3 (text)", family="gemma3:GEMMA3_TEXT", bent_logits=True
    ),
    "gemma4": _gemma4(
        title="Gemma 4",
        family="gemma4",
        decoders=("gemma4_text",),
        towers=("gemma4_vision",),
        whole_tiles=True,
        pixel_knobs=("max_pixels",),
        unshared=_BLOCKS,
    ),
    "gemma4_unified": _gemma4(
        title="Gemma 4 (without a tower)",
        family="gemma4_unified",
        has_experts=False,
        attention=OnlyAttention(("segments",), _BOTH_WAYS),
        whole_tiles=True,
        pixel_knobs=("max_pixels",),
        unshared=_BLOCKS,
    ),
    "gemma4_text": _gemma4(title="Gemma 4 (text)", family="gemma4:GEMMA4_TEXT"),
    "glm4_moe": _experts(title="GLM-4.5", prediction="model.layers.46 or model.layers.92"),
    "glm4_moe_lite": _experts(title="GLM-4.7-Flash", prediction="model.layers.47"),
    "deepseek_v3": _experts(title="DeepSeek-V3", prediction="model.layers.61"),
}
"""model_type of a config.json -> its line, in the order of the table."""


GENERIC = "generic"
"""The file in `vlmpack/families` of the family that takes what the others do not."""


_UNSHARED_IMAGES = Limit(
    "no family of ours serves this class. Its image features would go into its text each in one "
    "place, and the two answers of a pair share them",
    "use objective.name: sft, or a model that a family of ours serves (`vlmpack families`)",
)


_UNCAPTURED = Limit(
    "no family of ours serves this class, and it is run whole, with what follows from each row"
)


def generic_line(model_type: str) -> ServedModel:
    """The line of a class that the generic family trains; nobody said whether it has experts."""
    return ServedModel(
        title=model_type,
        family=GENERIC,
        has_experts=True,
        limits={"DPO": _UNSHARED_IMAGES, "CUDA graphs": _UNCAPTURED},
        unshared="no family of ours serves this class, and nobody tried shared prefixes with it",
    )


def model_types() -> tuple[str, ...]:
    """Every `model_type` of a config.json that some family serves."""
    return tuple(sorted(SERVED))


def nearest(model_type: str) -> str | None:
    """The served model_type that is spelled most like it; None where none is like it."""
    spelt = model_type.lower().replace("-", "_").replace(".", "_")
    if spelt.removesuffix("_text") in SERVED:  # its language model alone
        return spelt.removesuffix("_text")
    return next(iter(difflib.get_close_matches(spelt, SERVED, n=1, cutoff=0.5)), None)
