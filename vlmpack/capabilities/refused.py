"""Models that are refused with the reason: classes by the words of the sweep (`swept`), configs of
served ones by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from vlmpack.capabilities.config import language_config, quantised_refusal
from vlmpack.capabilities.limits import Limit
from vlmpack.capabilities.served import SERVED, ServedModel, nearest

Kind = Literal["image-text-to-text", "text"]

_MAPPINGS: dict[Kind, str] = {
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "text": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
}

_FILE = Path("models/auto/modeling_auto.py")


@cache
def registered(kind: Kind) -> frozenset[str]:
    """Values of `model_type` with a class of that kind; empty without transformers."""
    spec = find_spec("transformers")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    for folder in folders:
        path = Path(folder) / _FILE
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            block = re.search(rf"^{_MAPPINGS[kind]} = OrderedDict\((.*?)^\)", text, re.M | re.S)
            names = re.findall(r'^\s+\("([^"]+)", ', block[1], re.M) if block else []
            return frozenset(names)
    return frozenset()


def kind_of(model_type: str) -> Kind | None:
    """The kind of class that transformers registers for a model_type. None if it has none."""
    return next((kind for kind in _MAPPINGS if model_type in registered(kind)), None)


Word = Literal["served", "proven", "refused"]


@dataclass(frozen=True, slots=True)
class Swept:
    """What can be done with a class; `reason` is the missing fact where it is refused."""

    word: Word
    reason: str = ""


def words_in(name: str) -> Mapping[str, Swept]:
    """What a file of the sweep says of each class; those of `SERVED` are served all the same."""
    content = json.loads(Path(__file__).with_name(name).read_text(encoding="ascii"))
    return {
        name: Swept("served") if name in SERVED else Swept(**word) for name, word in content.items()
    }


FILES: Mapping[Kind, str] = {"image-text-to-text": "swept.json", "text": "swept_text.json"}
"""Where the words of each kind of class stand, next to this module."""

IMAGES: Mapping[str, Swept] = words_in(FILES["image-text-to-text"])
"""Classes with images, by model_type."""

TEXT: Mapping[str, Swept] = words_in(FILES["text"])
"""Language models alone, by model_type."""

SWEPT: Mapping[str, Swept] = {**TEXT, **IMAGES}
"""The words of both."""


SCORES_CAP, LOGITS_CAP = "attn_logit_softcapping", "final_logit_softcapping"
"""Keys of a tanh on the scores of attention, and on those of the head."""

IN_IMAGES = "vision"
"""The value of `use_bidirectional_attention` that leaves text causal."""

LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Keys that list what each layer of the decoder is."""

PACKABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers that stop at the ends of packed samples in every family."""


_NONE = "no version that would do is known"


def refusal(config: Mapping[str, object]) -> str | None:
    """Why no engine can train a model; None where its family serves it."""
    language = language_config(config)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type not in SERVED:
        return _by_the_sweep(model_type) or quantised_refusal(config)
    served = SERVED.get(model_type) if isinstance(model_type, str) else None
    rule = _refused_by_rule(config, served) or _refused_by_rule(language, served)
    if rule is not None:
        return f"the model (model_type {model_type!r}) cannot be trained: {rule}"
    if not isinstance(model_type, str):
        found = "has no model_type" if model_type is None else f"has model_type {model_type!r}"
        return f"config.json {found}; `vlmpack families` lists those that can be trained"
    return (
        _other_decoder(model_type, language)
        or _other_tower(model_type, config)
        or quantised_refusal(config)
    )


def _by_the_sweep(model_type: str) -> str | None:
    """Why the generic family cannot train a class. None if it can, or if the class is newer than
    the sweep. Then `verify` decides before the first step."""
    found = SWEPT.get(model_type)
    if found is not None and found.word == "refused":
        return f"model_type {model_type!r} cannot be trained: {found.reason}"
    if found is not None or kind_of(model_type) is not None:
        return None
    near = nearest(model_type)
    meant = f"did you mean {near!r}? " if near else ""
    return (
        f"no family of this version serves model_type {model_type!r}, and transformers registers "
        f"no class for it; {meant}`vlmpack families` lists what can be trained"
    )


def _refused_by_rule(values: Mapping[str, object], served: ServedModel | None) -> Limit | None:
    """By what its layers are; what is said of logits and of other layers depends on the class."""
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
        others = sorted({str(kind) for kind in kinds} - tested)
        if others:
            return Limit(
                f"it has layers of kind {', '.join(others)} ({key}), and vlmpack cannot tell them "
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
