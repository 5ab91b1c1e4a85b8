"""An untrained model of the tiny one's shape whose parameters are large against noise."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from support.shards import TINY_MODEL

from vlmpack.model_folder.content import PROCESSOR_FILES

WIDTH = 512
LAYERS = 8


def write_wide_model(
    folder: Path,
    *,
    width: int = WIDTH,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A folder with the tiny model's tower and processor and a wider language model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(TINY_MODEL)
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = width, 3 * width, layers
    text.num_attention_heads, text.num_key_value_heads = 8, 2
    half = width // 8 // 2
    text.rope_parameters["mrope_section"] = [half - 2 * (3 * half // 8)] + [3 * half // 8] * 2
    text.layer_types = ["full_attention"] * layers
    config.vision_config.out_hidden_size = width
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.to(dtype).save_pretrained(folder)
    for name in PROCESSOR_FILES:
        if (TINY_MODEL / name).is_file():
            shutil.copyfile(TINY_MODEL / name, folder / name)
    return folder
