"""The published ids of tokens are those that configs, families and templates mean."""

from __future__ import annotations

import json

import pytest
from support.published_gemma4 import CONFIGS, IMAGE_TOKENS
from support.published_hybrids import QWEN3_5_0_8B, QWEN3_6_27B, QWEN3_6_35B
from support.published_templates import published_templates
from support.published_tokens import (
    GEMMA_ENDS,
    GEMMA_TOKENS,
    QWEN_ADDED,
    QWEN_ENDS,
    QWEN_SPECIAL,
    QWEN_TOKENIZER,
)

from vlmpack.families.registry import family_of


@pytest.mark.parametrize(
    "config", [QWEN3_5_0_8B, QWEN3_6_27B, QWEN3_6_35B], ids=["0.8B", "27B", "35B-A3B"]
)
def test_ids_of_qwen(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    family = family_of(tmp_path)
    assert QWEN_SPECIAL[config["image_token_id"]] == family.image_token
    assert QWEN_SPECIAL[config["video_token_id"]] == "<|video_pad|>"
    text = config["text_config"]
    assert QWEN_SPECIAL[text["eos_token_id"]] == QWEN_TOKENIZER["pad_token"]
    assert QWEN_SPECIAL[QWEN_ENDS[0]] == QWEN_TOKENIZER["eos_token"]
    assert max(QWEN_ADDED) < text["vocab_size"]


@pytest.mark.parametrize("name", CONFIGS)
def test_ids_of_gemma(tmp_path, name):
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    family = family_of(tmp_path)
    assert config["image_token_id"] == GEMMA_TOKENS[family.image_token]
    for key in ("boi", "image", "eoi"):
        assert config[f"{key}_token_id"] == GEMMA_TOKENS[IMAGE_TOKENS[f"{key}_token"]]
    assert GEMMA_TOKENS["<turn|>"] in GEMMA_ENDS and GEMMA_TOKENS["<|tool_response>"] in GEMMA_ENDS


@pytest.mark.parametrize("name", published_templates())
def test_templates_are_tested_with_tokens_that_are_special_there(name):
    special = set(published_templates()[name].special)
    if name.startswith("Gemma"):
        assert special <= set(GEMMA_TOKENS)
    elif name.startswith("Qwen"):
        assert special <= set(QWEN_SPECIAL.values())
    else:
        assert special == {"<|im_start|>", "<|im_end|>"}
