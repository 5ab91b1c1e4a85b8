"""Multi-token prediction: layers of a model folder that predict further tokens, for faster answers.

Training never reads them. The loss is that of the next token, and in packed rows their targets
would cross the ends of samples. An export copies them from the model folder bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PREDICTION_LAYERS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_layers",
    "mtp_num_hidden_layers",
)
"""Keys of config.json that count such layers."""

LANGUAGE_SECTIONS = ("text_config", "llm_config", "language_config")
"""Where the config.json of a vision-language model keeps its language model's."""

_BEFORE_LAYERS = {"model", "language_model", "decoder"}


def language_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The section of the language model; empty where it has none."""
    sections = (config.get(key) for key in LANGUAGE_SECTIONS)
    return next((part for part in sections if isinstance(part, Mapping)), {})


def prediction_layers(config: Mapping[str, object]) -> tuple[str, int] | None:
    """The key that counts a model's prediction layers and their number; None without any."""
    for values in (config, language_config(config)):
        for key in PREDICTION_LAYERS:
            count = values.get(key)
            if isinstance(count, int) and count > 0:
                return key, count
    return None


def is_prediction(name: str, config: Mapping[str, object]) -> bool:
    """Whether a tensor belongs to prediction layers that config.json counts.

    Its name has `mtp...` or `nextn...`, or a layer after the last one (DeepSeek-V3's
    model.layers.61 of 61).
    """
    counted = prediction_layers(config)
    if counted is None:
        return False
    parts = name.split(".")
    if any(part.startswith(("mtp", "nextn")) for part in parts):
        return True
    depth = {**config, **language_config(config)}.get("num_hidden_layers")
    if not isinstance(depth, int) or "layers" not in parts[:-1]:
        return False
    place = parts.index("layers")
    number = parts[place + 1]
    if not set(parts[:place]) <= _BEFORE_LAYERS or not number.isdigit():
        return False
    return depth <= int(number) < depth + counted[1]


def prediction_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json, or a section of it, says of prediction layers by itself."""
    return {
        key: value
        for key, value in values.items()
        if key in PREDICTION_LAYERS or key.startswith("mtp_")
    }


TRAINABLE_METHOD = "bitsandbytes"
"""The method whose layers pass gradients to adapters, under engine hf."""
_KEYS = ("quantization_config", "compression_config")
"""What config.json calls the section; the second is that of earlier compressed-tensors."""


def quantised_refusal(config: Mapping[str, object]) -> str | None:
    """Why the weights of a folder cannot be trained. None for dense weights, and for those that
    bitsandbytes packed.

    Other methods hold integers, or floats of 8 bits with separate scales. Their kernels are for
    inference. Some return no gradient, and none supports an optimizer's step.
    """
    for method in _methods(config):
        if method != TRAINABLE_METHOD:
            return (
                f"its weights are quantised by {method} (quantization_config). vlmpack trains "
                f"dense weights, or adapters with those of {TRAINABLE_METHOD}. Expected the model "
                "that it was made from, often named without the suffix. "
                "trainable.lora.quantize: nf4 holds frozen weights in 4 bits"
            )
    return None


def _methods(config: Mapping[str, object]) -> Iterator[str]:
    for values in (config, language_config(config)):
        for key in _KEYS:
            section = values.get(key)
            if isinstance(section, Mapping):
                packed = section.get("load_in_4bit") or section.get("load_in_8bit")
                method = section.get("quant_method") or (TRAINABLE_METHOD if packed else "")
                yield str(getattr(method, "value", method)) or "an unnamed method"
            elif section is not None:
                yield "an unnamed method"
