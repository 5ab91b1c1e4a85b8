"""Model families that are refused by name, and configs that are refused by rule, with the reason.

What is said of transformers here was read in the sources of 5.23; `tests/families` checks it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlmpack.capabilities.limits import Limit
from vlmpack.capabilities.prediction import language_config
from vlmpack.capabilities.registered import kind_of
from vlmpack.capabilities.served import SERVED, ServedModel, nearest
from vlmpack.capabilities.swept import SWEPT

SCORES_CAP, LOGITS_CAP = "attn_logit_softcapping", "final_logit_softcapping"
"""Keys of a tanh on the scores of attention, and on those of the head."""

IN_IMAGES = "vision"
"""The value of `use_bidirectional_attention` that leaves text causal."""

LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Keys that list what each layer of the decoder is."""

PACKABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers that stop at the ends of packed samples in every family."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A family that is refused by name.

    Args:
        title: what people call it.
        model_types: values of `model_type` in its config.json files.
        limit: why, and what would do.
        alone: whether it has a line of its own where families with the same reason share one.
    """

    title: str
    model_types: tuple[str, ...]
    limit: Limit
    alone: bool = False


_STATE = "layers carry state over the ends of packed samples"
_UNSERVED = "no family of vlmpack serves this model_type yet"
_UNTOLD = "and transformers 5.23 does not tell them where samples end"
_NONE = "no version that would do is known"
_A_FAMILY = "would do: a family of its own, as Qwen3.5 and Nemotron-H have, whose layers are reset"

_GATED_DELTA_NET = Limit(f"its GatedDeltaNet {_STATE}, and {_UNSERVED}", _A_FAMILY)
_KIMI_DELTA = Limit(
    f"its Kimi Delta Attention {_STATE}, and vlmpack has no form of it that is reset there", _NONE
)
_MAMBA = Limit(f"its Mamba {_STATE}, {_UNTOLD}", _NONE)
_MAMBA_2 = Limit(f"its Mamba-2 {_STATE}, and {_UNSERVED}", _A_FAMILY)
_SHORT_CONVOLUTION = Limit(
    f"its short convolutions reach over the ends of packed samples, and {_UNSERVED}", _A_FAMILY
)
_RECURRENT = Limit(f"its recurrent {_STATE}, {_UNTOLD}", _NONE)
_SINKS = Limit("its attention has sinks, which vlmpack's does not", _NONE)
_INDEXER = Limit(
    "its sparse attention picks keys from the whole row, the samples beside one's own too", _NONE
)

REFUSED: tuple[Refused, ...] = (
    Refused("Qwen3-Next", ("qwen3_next",), _GATED_DELTA_NET, alone=True),
    Refused("Olmo Hybrid", ("olmo_hybrid",), _GATED_DELTA_NET),
    Refused("DeepSeek-V3.2", ("deepseek_v32",), _INDEXER),
    Refused("MiMo-V2-Flash", ("mimo_v2_flash",), _SINKS),
    Refused("Kimi Linear", ("kimi_linear",), _KIMI_DELTA),
    Refused("Ling 2.5 (hybrid)", ("bailing_hybrid",), _KIMI_DELTA),
    Refused("Mamba", ("mamba",), _MAMBA),
    Refused("Falcon Mamba", ("falcon_mamba",), _MAMBA),
    Refused("Jamba", ("jamba",), _MAMBA),
    Refused("Zamba", ("zamba",), _MAMBA),
    Refused("Mamba-2", ("mamba2",), _MAMBA_2),
    Refused("Zamba2", ("zamba2",), _MAMBA_2),
    Refused("Bamba", ("bamba",), _MAMBA_2),
    Refused("Falcon-H1", ("falcon_h1",), _MAMBA_2),
    Refused("Granite 4 (hybrid)", ("granitemoehybrid",), _MAMBA_2),
    Refused("LFM2", ("lfm2", "lfm2_moe"), _SHORT_CONVOLUTION),
    Refused("LFM3", ("lfm3",), _SHORT_CONVOLUTION),
    Refused("MiniMax-01", ("minimax",), _RECURRENT),
    Refused("RecurrentGemma", ("recurrent_gemma",), _RECURRENT),
    Refused("RWKV", ("rwkv",), _RECURRENT),
    Refused("xLSTM", ("xlstm",), _RECURRENT),
)
"""In the order of the page."""

_BY_TYPE: Mapping[str, Refused] = {name: row for row in REFUSED for name in row.model_types}


def refusal(config: Mapping[str, object]) -> str | None:
    """Why no engine can train a model; None where its family serves it.

    Args:
        config: the content of its config.json.
    """
    language = language_config(config)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and not {model_type} & (SERVED.keys() | _BY_TYPE.keys()):
        return _by_the_sweep(model_type)
    for name in (model_type, language.get("model_type")):
        if isinstance(name, str) and name in _BY_TYPE:
            row = _BY_TYPE[name]
            return f"{row.title} (model_type {name!r}) cannot be trained: {row.limit}"
    served = SERVED.get(model_type) if isinstance(model_type, str) else None
    rule = _refused_by_rule(config, served) or _refused_by_rule(language, served)
    if rule is not None:
        return f"the model (model_type {model_type!r}) cannot be trained: {rule}"
    if not isinstance(model_type, str):
        found = "has no model_type" if model_type is None else f"has model_type {model_type!r}"
        return f"config.json {found}; `vlmpack families` lists those that can be trained"
    return _other_decoder(model_type, language) or _other_tower(model_type, config)


def _by_the_sweep(model_type: str) -> str | None:
    """Why the generic family cannot train a class; None where it can, or where the class is newer
    than the sweep: `verify` decides then, before the first step."""
    found = SWEPT.get(model_type)
    if found is not None and found.word == "refused":
        return f"model_type {model_type!r} cannot be trained: {found.reason}"
    kind = kind_of(model_type)
    if found is not None or kind == "image-text-to-text":
        return None
    near = nearest(model_type)
    meant = f"did you mean {near!r}? " if near else ""
    unknown = "" if kind == "text" else ", and transformers registers no class for it"
    return (
        f"no family of this version serves model_type {model_type!r}{unknown}; {meant}"
        f"`vlmpack families` lists what can be trained"
    )


def _refused_by_rule(values: Mapping[str, object], served: ServedModel | None) -> Limit | None:
    """By what its layers are; what is said of logits and of other layers depends on the class.

    Args:
        values: of config.json, or of its language model's section.
        served: the line of its model_type; None without one.
    """
    for key in (SCORES_CAP,) if served and served.bent_logits else (SCORES_CAP, LOGITS_CAP):
        if values.get(key) is not None:
            of_whom = " for this model_type" if key == LOGITS_CAP else ""
            return Limit(
                f"it caps logits ({key} {values[key]}), which vlmpack does not{of_whom}", _NONE
            )
    if values.get("use_bidirectional_attention") not in (None, False, IN_IMAGES):
        return Limit(
            "its text attends in both directions (use_bidirectional_attention), so it predicts no "
            "next token",
            _NONE,
        )
    for key in LAYER_KINDS:
        kinds = values.get(key)
        if not isinstance(kinds, (list, tuple)):
            continue
        tested = PACKABLE_LAYERS.union(served.layers if served else ())
        odd = sorted({str(kind) for kind in kinds} - tested)
        if odd:
            return Limit(
                f"it has layers of kind {', '.join(odd)} ({key}), and vlmpack cannot tell them "
                "where a packed sample ends",
                _NONE,
            )
    return None


def _other_decoder(model_type: str, language: Mapping[str, object]) -> str | None:
    """Some classes take any language model; only the tested ones pass."""
    served = SERVED[model_type]
    decoder = language.get("model_type")
    if not served.decoders or not isinstance(decoder, str) or decoder in served.decoders:
        return None
    return (
        f"{served.title} (model_type {model_type!r}) with a language model of model_type "
        f"{decoder!r} is not served, with {', '.join(served.decoders)} it is"
    )


def _other_tower(model_type: str, config: Mapping[str, object]) -> str | None:
    """Some classes take any vision tower; only the tested ones pass."""
    served, vision = SERVED[model_type], config.get("vision_config")
    tower = vision.get("model_type") if isinstance(vision, Mapping) else None
    if not served.towers or tower in served.towers:
        return None
    return (
        f"model_type {model_type!r} with a vision tower of model_type {tower!r} is not served, "
        f"with {', '.join(served.towers)} ({served.title}) it is"
    )
