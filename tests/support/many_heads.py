"""Tiny models of every family with so many heads that eight ranks can exchange them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.families import QWEN_STOCK, TINY, write_tiny
from support.shards import TINY_MODEL
from support.tiny_family import TinyFamily

FACTOR = 4
"""To 16 query heads, and to 8 key-value heads of the 2 that most families have. Gemma 4's layers
with one key-value head keep it, and all ranks have a copy."""

COUNTS = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_num_heads",
    "n_groups",
)
SMALLEST_HEAD = 8
"""Channels, which three axes of positions need."""


def many_heads_folder(name: str, tmp: Path) -> Path:
    """A model folder of one of `FAMILIES`, in an empty folder."""
    tiny = TINY.get(name) or _committed()
    return write_tiny(replace(tiny, config=lambda: _with_heads(tiny.config())), tmp)


def _committed() -> TinyFamily:
    from transformers import AutoConfig

    images = json.loads((TINY_MODEL / "preprocessor_config.json").read_text(encoding="utf-8"))
    return TinyFamily(
        config=lambda: AutoConfig.from_pretrained(str(TINY_MODEL)), stock=QWEN_STOCK, images=images
    )


def _with_heads(config: Any) -> Any:
    values = config.to_dict()  # Gemma 4 gives some of them by layers alone
    text = values.get("text_config") or values
    text |= {count: FACTOR * text[count] for count in COUNTS if text.get(count)}
    if not text.get("head_dim"):  # then all heads together are as wide as the layer
        heads = text["num_attention_heads"] = text["hidden_size"] // SMALLEST_HEAD
        text["num_key_value_heads"] = min(heads, text["num_key_value_heads"])
        if "mrope_section" in text["rope_parameters"]:
            text["rope_parameters"]["mrope_section"] = [1, 1, 2]
    return type(config).from_dict(values)
