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


_KEYS = ("quantization_config", "compression_config")
"""What config.json calls the section; the second is that of earlier compressed-tensors."""


def quantised_refusal(config: Mapping[str, object]) -> str | None:
    """Why the weights of a folder cannot be read. None for dense weights, and for those whose codes
    `model_folder.quantised` unpacks.
    """
    for method, section in quantised_sections(config):
        found = _unknown_scheme(method, section)
        if found is not None:
            return (
                f"its weights are quantised by {found} (quantization_config), which is not read. "
                "Expected the model that it was made from, often named without the suffix. "
                "trainable.lora.quantize: nf4 or int8 holds frozen weights in few bits"
            )
    return None


def _unknown_scheme(method: str, section: Mapping[str, Any]) -> str | None:
    """The name of a scheme that is not read."""
    if method == "compressed-tensors":
        groups = section.get("config_groups")
        weights = [
            each.get("weights") or {} if isinstance(each, Mapping) else {}
            for each in (groups.values() if isinstance(groups, Mapping) else [{}])
        ]
        said = section.get("format")
        kinds = {f"{each.get('type')} of {each.get('num_bits')} bits" for each in weights}
        if said != "pack-quantized":
            return f"{method} in the format {said!r}"
        if kinds not in ({"int of 4 bits"}, {"int of 8 bits"}):
            return f"{method} with weights of {' and '.join(sorted(kinds))}"
        ordered = [each.get("actorder") for each in weights]
        return f"{method} with actorder: group" if "group" in ordered else None
    return None if method in ("bitsandbytes", "fp8") else method


def quantised_sections(
    config: Mapping[str, object],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The method and the section of each quantisation that a config.json names, once each."""
    seen: list[object] = []
    for values in (config, language_config(config)):
        for key in _KEYS:
            section = values.get(key)
            if section is None or section in seen:
                continue
            seen.append(section)
            known: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
            packed = known.get("load_in_4bit") or known.get("load_in_8bit")
            method = known.get("quant_method") or ("bitsandbytes" if packed else "")
            yield str(getattr(method, "value", method)) or "an unnamed method", known
