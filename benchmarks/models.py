"""The tiny model, and untrained ones of its shape that are wide enough to be bound by compute."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from vlmpack.model_folder.content import PROCESSOR_FILES

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "assets" / "tiny-qwen2_5_vl"


def wide_model(width: int, *, layers: int = 8, key_heads: int = 2) -> Any:
    """A transformers Qwen2.5-VL with the tiny model's tower and a wider language model, float32."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(TINY)
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = width, 3 * width, layers
    text.num_attention_heads, text.num_key_value_heads = 8, key_heads
    half = width // 8 // 2
    text.rope_parameters["mrope_section"] = [half - 2 * (3 * half // 8)] + [3 * half // 8] * 2
    text.layer_types = ["full_attention"] * layers
    config.vision_config.out_hidden_size = width
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def write_wide_model(folder: Path, width: int, *, layers: int = 8, key_heads: int = 2) -> Path:
    """The same as a folder, with the tiny model's processor."""
    wide_model(width, layers=layers, key_heads=key_heads).save_pretrained(folder)
    for name in PROCESSOR_FILES:
        if (TINY / name).is_file():
            shutil.copyfile(TINY / name, folder / name)
    return folder
