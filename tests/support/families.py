"""Tiny models of every family: the real transformers classes with seeded random weights.

Tokenizer and chat template are those of the committed tiny model; sizes are small, but no two that
could be mistaken for one another are equal (a head's width times their number is not the hidden
size, the tower is not as wide as the language model, experts are not square).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.shards import TINY_MODEL

TOKENS = {
    "image_token_id": 574,
    "video_token_id": 575,
    "vision_start_token_id": 571,
    "vision_end_token_id": 572,
}
TEXT = {
    "vocab_size": 576,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "pad_token_id": 568,
    "bos_token_id": 568,
    "eos_token_id": 570,
}
"""Ids are those of the committed tokenizer. 0.1 is about the square root of 1 / hidden_size: every
layer changes its input as much as it carries it, so gradients are no sums of tiny numbers."""


PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000.0}


def _rope(*sections: int) -> dict[str, Any]:
    return {**PLAIN_ROPE, "mrope_section": list(sections)}


def _qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig

    return Qwen2VLConfig(
        text_config={**TEXT, "num_hidden_layers": 3, "rope_parameters": _rope(2, 3, 3)},
        vision_config={
            "depth": 3,
            "embed_dim": 48,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 14,
            "initializer_range": 0.1,
        },
        tie_word_embeddings=True,
        **TOKENS,
    )


def _qwen3_vision() -> dict[str, Any]:
    return {
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
        "initializer_range": 0.1,
    }


def _qwen3_text() -> dict[str, Any]:
    return {
        **TEXT,
        "num_hidden_layers": 4,
        "head_dim": 24,
        "rope_parameters": {**_rope(6, 3, 3), "mrope_interleaved": True},
    }


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(
        text_config=_qwen3_text(),
        vision_config=_qwen3_vision(),
        tie_word_embeddings=True,
        **TOKENS,
    )


def _qwen3_vl_moe() -> Any:
    from transformers import Qwen3VLMoeConfig

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    }
    return Qwen3VLMoeConfig(
        text_config={**_qwen3_text(), **experts, "tie_word_embeddings": False},
        vision_config=_qwen3_vision(),
        tie_word_embeddings=False,
        **TOKENS,
    )


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        **TEXT, num_hidden_layers=3, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True
    )


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        **TEXT,
        num_hidden_layers=4,
        head_dim=24,
        rope_parameters=PLAIN_ROPE,
        tie_word_embeddings=True,
    )


def _llama() -> Any:
    """With the rotary scaling of Llama 3, at a length that the samples exceed."""
    from transformers import LlamaConfig

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaConfig(
        **TEXT,
        num_hidden_layers=2,
        rope_parameters={**PLAIN_ROPE, **scaling},
        tie_word_embeddings=False,
    )


TEXT_CONFIGS: dict[str, Callable[[], Any]] = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3}
"""Language models without a vision tower."""

TEXT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""ChatML as Qwen2 publishes it: content is a string, and a list of parts breaks it."""

_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    **TEXT_CONFIGS,
}

_QWEN3_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_IMAGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"processor_class": "Qwen2VLProcessor"},
    "qwen3_vl": _QWEN3_IMAGES,
    "qwen3_vl_moe": _QWEN3_IMAGES,
}
"""What the published preprocessor_config.json has beside sizes."""

FAMILIES = ("qwen2_5_vl", *_CONFIGS)
"""Every `model_type` that can be trained; qwen2_5_vl is the committed model."""

SLOW_FAMILIES = {"qwen2"}
"""Tested among the slow tests alone: the decoder is that of qwen2_vl and qwen2_5_vl."""

VISION_FAMILIES = tuple(name for name in FAMILIES if name not in TEXT_CONFIGS)

ROUTED = {"qwen3_vl_moe"}
"""Mixtures of experts: a matmul of an expert has as many rows as tokens chose it, so another sample
changes how it is blocked, and with that the last bit of a row."""


def tiny_family_folder(name: str, tmp: Path) -> Path:
    """A model folder of a family in transformers format.

    Args:
        name: one of `FAMILIES`.
        tmp: an empty folder to write to, where the model is not a committed one.
    """
    if name not in _CONFIGS:
        return TINY_MODEL
    config = _CONFIGS[name]()
    _tiny_model(config).save_pretrained(str(tmp))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY_MODEL / file, tmp / file)
    if name in TEXT_CONFIGS:
        (tmp / "chat_template.jinja").write_text(TEXT_TEMPLATE, encoding="utf-8")
        return tmp
    images = json.loads((TINY_MODEL / "preprocessor_config.json").read_text(encoding="utf-8"))
    images |= {
        "patch_size": config.vision_config.patch_size,
        # The committed images are rows of digits: enlarged, they have several token rows too.
        "size": {"shortest_edge": 96 * 96, "longest_edge": 512 * 512},
        **_IMAGES.get(name, {}),
    }
    (tmp / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    return tmp


def _tiny_model(config: Any) -> Any:
    """Random weights; norms and biases too, which are ones and zeros by default."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    alone = config.model_type in TEXT_CONFIGS
    auto = AutoModelForCausalLM if alone else AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model
