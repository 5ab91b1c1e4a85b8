"""Tiny models of every family: the real transformers classes with seeded random weights.

A family is one `TinyFamily`, with those of its kind in a module of its own or here, and one entry
of `TINY`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.shards import TINY_MODEL
from support.stock import StockRules, rope_index
from support.tiny_family import FIRST_NEW_ID, PLAIN_ROPE, TEXT, VISION_TOKENS, TinyFamily
from support.tiny_gemma3 import GEMMA3, text_config
from support.tiny_gemma4 import GEMMA4, GEMMA4_DENSE, GEMMA4_MIXTURE, HEAD_NORMS
from support.tiny_gemma4 import text_config as gemma4_text_config
from support.tiny_gemma4_unified import GEMMA4_UNIFIED
from support.tiny_idefics3 import IDEFICS3, SMOL
from support.tiny_internvl import INTERNVL
from support.tiny_llava_onevision import LLAVA_ONEVISION
from support.tiny_nemotron_h import long_steps, nemotron_h
from support.tiny_nemotron_omni import NEMOTRON_OMNI
from support.tiny_pixtral import LLAVA, MISTRAL3
from support.tiny_qwen3_5 import (
    mild_decays,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_5_text,
)


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
        **VISION_TOKENS,
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
        **VISION_TOKENS,
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
        **VISION_TOKENS,
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


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 18,
}


def _glm4_moe() -> Any:
    """GLM-4.5: rotary over half of a head, a first layer without experts."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **TEXT,
        **_EXPERTS,
        n_routed_experts=4,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        head_dim=24,
        use_qk_norm=True,
        rope_parameters={**PLAIN_ROPE, "partial_rotary_factor": 0.5},
        num_nextn_predict_layers=1,
    )


def _glm4_moe_lite() -> Any:
    """GLM-4.7-Flash: latent attention."""
    from transformers import Glm4MoeLiteConfig

    return Glm4MoeLiteConfig(
        **{**TEXT, **_EXPERTS, **_LATENT},
        n_routed_experts=4,
        num_hidden_layers=2,
        mlp_layer_types=["dense", "sparse"],
        rope_parameters=PLAIN_ROPE,
    )


def _deepseek_v3() -> Any:
    """Latent attention; experts in groups, of which some are chosen from."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **{**TEXT, **_EXPERTS, **_LATENT},
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        rope_parameters=PLAIN_ROPE,
        num_nextn_predict_layers=1,
    )


TEXT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""ChatML as Qwen2 publishes it: content is a string, and a list of parts breaks it."""


def _qwen_images(processor_class: str, patch_size: int, **others: Any) -> dict[str, Any]:
    """The committed processor's content; its images are rows of digits: enlarged, they have several
    token rows too."""
    images = json.loads((TINY_MODEL / "preprocessor_config.json").read_text(encoding="utf-8"))
    size = {"shortest_edge": 96 * 96, "longest_edge": 512 * 512}
    return {
        **images,
        "patch_size": patch_size,
        "size": size,
        "processor_class": processor_class,
        **others,
    }


def _qwen_written(features: Any, processor: Any) -> str:
    count = int(features["image_grid_thw"].prod()) // processor.merge_size**2
    return QWEN_STOCK.placeholder * count


QWEN_STOCK = StockRules(
    placeholder="<|image_pad|>",
    written=_qwen_written,
    kinds="mm_token_type_ids",
    positions=rope_index,
)
_QWEN3_IMAGES = _qwen_images(
    "Qwen3VLProcessor",
    16,
    image_processor_type="Qwen2VLImageProcessorFast",
    image_mean=[0.5, 0.5, 0.5],
    image_std=[0.5, 0.5, 0.5],
)


def _text_family(config: Callable[[], Any], **others: Any) -> TinyFamily:
    return TinyFamily(config=config, stock=StockRules(), template=TEXT_TEMPLATE, **others)


TEXT_FAMILIES = {
    "llama": _text_family(_llama),
    "qwen2": _text_family(_qwen2),
    "qwen3": _text_family(_qwen3),
    "gemma3_text": _text_family(text_config),
    "qwen3_5_text": _text_family(qwen3_5_text, settle=mild_decays),
    "qwen3_5_moe_text": _text_family(qwen3_5_moe_text, settle=mild_decays),
    "nemotron_h": _text_family(nemotron_h, settle=long_steps),
    "glm4_moe": _text_family(_glm4_moe),
    "glm4_moe_lite": _text_family(_glm4_moe_lite),
    "deepseek_v3": _text_family(_deepseek_v3),
    "gemma4_text": _text_family(gemma4_text_config, scaled=HEAD_NORMS),
}
"""Language models without a vision tower."""

TINY: dict[str, TinyFamily] = {
    "qwen2_vl": TinyFamily(
        config=_qwen2_vl, stock=QWEN_STOCK, images=_qwen_images("Qwen2VLProcessor", 14)
    ),
    "qwen3_vl": TinyFamily(config=_qwen3_vl, stock=QWEN_STOCK, images=_QWEN3_IMAGES),
    "qwen3_vl_moe": TinyFamily(config=_qwen3_vl_moe, stock=QWEN_STOCK, images=_QWEN3_IMAGES),
    "qwen3_5": TinyFamily(
        config=qwen3_5, stock=QWEN_STOCK, images=_QWEN3_IMAGES, settle=mild_decays
    ),
    "qwen3_5_moe": TinyFamily(
        config=qwen3_5_moe, stock=QWEN_STOCK, images=_QWEN3_IMAGES, settle=mild_decays
    ),
    "internvl": INTERNVL,
    "llava_onevision": LLAVA_ONEVISION,
    "idefics3": IDEFICS3,
    "smolvlm": SMOL,
    "mistral3": MISTRAL3,
    "llava": LLAVA,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "gemma4-dense": GEMMA4_DENSE,
    "gemma4-mixture": GEMMA4_MIXTURE,
    "gemma4_unified": GEMMA4_UNIFIED,
    "nemotron_h_omni": NEMOTRON_OMNI,
    **TEXT_FAMILIES,
}
"""By `model_type`; what follows a dash tells another shape of one apart."""

COMMITTED = "qwen2_5_vl"
"""The family of the committed model."""

FAMILIES = (COMMITTED, *TINY)
"""Every `model_type` that can be trained, some in several shapes."""

QUICK_FAMILIES = {"qwen2_5_vl", "gemma3", "llava_onevision", "nemotron_h"}
"""Quick cases of what runs for every family: an axis of positions each for time, height and width,
attention of images to both sides, tiles, and layers with a recurrence."""

SLOW_FAMILIES = {
    "qwen3_vl",
    "qwen3_5_moe",
    "gemma4",
    "nemotron_h_omni",
    "internvl",
    "deepseek_v3",
}
"""Slow cases: one of each further kind of tower, decoder and experts. The others are made of parts
of these, and tested in `make soak`."""


def family_cases(names: Iterable[str]) -> list[Any]:
    """Parameters of tests that run for every family, each where it is tested."""
    return [
        name
        if name in QUICK_FAMILIES
        else pytest.param(
            name, marks=pytest.mark.slow if name in SLOW_FAMILIES else pytest.mark.soak
        )
        for name in names
    ]


VISION_FAMILIES = tuple(name for name in FAMILIES if name not in TEXT_FAMILIES)

ROUTED = {
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "nemotron_h",
    "nemotron_h_omni",
    "gemma4-mixture",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
}
"""Mixtures of experts: a matmul of an expert has as many rows as tokens chose it, so another sample
changes how it is blocked, and with that the last bit of a row."""


def model_type_of(name: str) -> str:
    """The `model_type` of one of `FAMILIES`."""
    return name.partition("-")[0]


def tiny_family_folder(name: str, tmp: Path) -> Path:
    """A model folder of a family in transformers format.

    Args:
        name: one of `FAMILIES`.
        tmp: a folder to write to, empty or not there yet, where the model is not a committed one.
    """
    if name not in TINY:
        return TINY_MODEL
    tmp.mkdir(parents=True, exist_ok=True)
    for file, content in _files_of(name).items():
        (tmp / file).write_bytes(content)
    return tmp


@cache
def _files_of(name: str) -> dict[str, bytes]:
    """The files of a tiny model, which is made once for all tests of a process."""
    with TemporaryDirectory() as folder:
        return {f.name: f.read_bytes() for f in write_tiny(TINY[name], Path(folder)).iterdir()}


def write_tiny(tiny: TinyFamily, tmp: Path) -> Path:
    """A model folder of a tiny model, in an empty folder."""
    _tiny_model(tiny).save_pretrained(str(tmp))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY_MODEL / file, tmp / file)
    if tiny.tokens:
        _add_tokens(tmp, tiny.tokens, tiny.words)
    if tiny.template is not None:
        (tmp / "chat_template.jinja").write_text(tiny.template, encoding="utf-8")
    if tiny.images is not None:
        content = json.dumps(tiny.images)
        (tmp / "preprocessor_config.json").write_text(content, encoding="utf-8")
    for file, text in tiny.files.items():
        (tmp / file).write_text(text, encoding="utf-8")
    return tmp


def _add_tokens(folder: Path, tokens: tuple[str, ...], words: tuple[str, ...]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    added = tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    assert added == len(tokens), tokens
    assert tokenizer.add_tokens(list(words)) == len(words), words
    assert tokenizer.convert_tokens_to_ids(tokens[0]) == FIRST_NEW_ID
    tokenizer.save_pretrained(str(folder))


def stock_rules(folder: Path) -> StockRules:
    """The rules for a model folder, by its model_type."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = config["model_type"]
    return QWEN_STOCK if name == COMMITTED else TINY[name].stock


def _tiny_model(tiny: TinyFamily) -> Any:
    """Random weights; norms, biases and projections too, which are ones or zeros by default."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny.config()
    auto = AutoModelForCausalLM if tiny.images is None else AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or parameter.min() == parameter.max():
                    parameter.add_(0.2 * torch.randn_like(parameter))
                for part, factor in tiny.scaled.items():
                    parameter.mul_(factor if part in name else 1.0)
                if tiny.settle is not None:
                    tiny.settle(name, parameter)
    return model
