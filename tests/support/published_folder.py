"""A model folder of a published size: its config.json and the settings of its processor, a file
with its tensors' names and shapes, the tiny model's tokenizer, and its chat template. Qwen3-VL has
the tiny model's template too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.published_gemma4 import IMAGE_TOKENS, PROCESSOR
from support.published_hybrids import QWEN3_5_PROCESSOR
from support.published_names import Shapes, write_header
from support.published_templates import published_templates
from support.shards import TINY_MODEL
from support.tool_templates import without_marks

_TEMPLATES = {
    "Qwen3.5": "Qwen3.5, 2B and smaller",
    "Qwen3.6": "Qwen3.6",
    "Qwen3.8": "Qwen3.8",
    "Nemotron": "Nemotron 3 Nano",
    "Gemma-4-E": "Gemma 4, E2B and E4B",
    "Gemma-4": "Gemma 4, 26B-A4B and 31B",
}


_NAMED = {
    False: {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    True: {"image_token_id": IMAGE_TOKENS["image_token"]},
}
"""Ids that config.json names, and their tokens: the small tokenizer has others than the published
one. By whether the model is a Gemma."""


def published_folder(folder: Path, name: str, config: dict[str, Any], shapes: Shapes) -> Path:
    """Write it.

    Args:
        folder: which exists.
        name: of the model.
        config: its config.json, or that of its text form.
        shapes: of its tensors.
    """
    from transformers import AutoTokenizer

    write_header(folder / "model.safetensors", shapes)
    start = next((start for start in _TEMPLATES if name.startswith(start)), "")
    template = published_templates()[_TEMPLATES[start]] if start else None
    gemma, images = start.startswith("Gemma"), "vision_config" in config
    tokens = [*(template.special if template else ()), *(IMAGE_TOKENS.values() if gemma else ())]
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_MODEL))
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(tokens))})
    if gemma:
        tokenizer.bos_token = "<bos>"
    if template is not None:
        tokenizer.chat_template = without_marks(template).text
    tokenizer.save_pretrained(str(folder))
    ids = {key: tokenizer.get_vocab()[token] for key, token in _NAMED[gemma].items()}
    config = {**config, **{key: ids[key] for key in ids.keys() & config.keys()}}
    if gemma:
        config["audio_config"] = None  # no sample reaches the audio tower, and no shapes are its
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if gemma:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**settings, **IMAGE_TOKENS}), encoding="utf-8")
    if images and gemma:
        (folder / "processor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    elif images:
        text = json.dumps(QWEN3_5_PROCESSOR)
        (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
    return folder
