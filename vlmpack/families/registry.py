"""model_type of a config.json -> family. A literal table, resolved lazily."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families.base import Family

_HOMES: dict[str, str] = {
    "llama": "vlmpack.families.text_lm",
    "qwen2": "vlmpack.families.text_lm",
    "qwen2_vl": "vlmpack.families.qwen2_vl",
    "qwen2_5_vl": "vlmpack.families.qwen2_5_vl",
    "qwen3": "vlmpack.families.text_lm",
    "qwen3_vl": "vlmpack.families.qwen3_vl",
    "qwen3_vl_moe": "vlmpack.families.qwen3_vl",
}


def model_types() -> tuple[str, ...]:
    """Every `model_type` of a config.json that some family serves."""
    return tuple(sorted(_HOMES))


def family_of(folder: Path) -> Family:
    """The family that serves a model folder.

    Raises:
        ModelError: the folder or its config.json is missing or unreadable.
        CapabilityError: no family serves its model_type.
    """
    config = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(
            f"model.path: {folder} is not a folder; expected a model in transformers format "
            f"(config.json, *.safetensors, tokenizer and processor files)"
        )
    if not config.is_file():
        raise ModelError(f"model.path: {folder} has no config.json; it is no transformers model")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"model.path: {config} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"model.path: {config} holds no JSON object, so it names no model_type")
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in _HOMES:
        raise CapabilityError(
            f"model.path: {folder} has model_type {model_type!r}; this version can train: "
            f"{', '.join(model_types())}"
        )
    family: Family = import_module(_HOMES[model_type]).FAMILY
    return family
