"""What is published of tokenizers: tokens beside the vocabulary, and settings; no vocabulary.

Qwen3.5 to 3.8: tokenizer_config.json and generation_config.json of Qwen/Qwen3.8-27B at
1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0. Gemma 4: ids of which five public programs hold the same;
those that end an answer are of gemma-4-E2B-it. Nemotron 3.5 Lightning at a9904d24bcc1 ends answers
with two ids.
"""

from __future__ import annotations

from typing import Any

QWEN_SPECIAL = {
    248044: "<|endoftext|>",
    248045: "<|im_start|>",
    248046: "<|im_end|>",
    248047: "<|object_ref_start|>",
    248048: "<|object_ref_end|>",
    248049: "<|box_start|>",
    248050: "<|box_end|>",
    248051: "<|quad_start|>",
    248052: "<|quad_end|>",
    248053: "<|vision_start|>",
    248054: "<|vision_end|>",
    248055: "<|vision_pad|>",
    248056: "<|image_pad|>",
    248057: "<|video_pad|>",
}
QWEN_ADDED = {
    248058: "<tool_call>",
    248059: "</tool_call>",
    248066: "<tool_response>",
    248067: "</tool_response>",
    248068: "<think>",
    248069: "</think>",
}
"""Tokens of their own that are not special: a text may spell them."""

QWEN_TOKENIZER: dict[str, Any] = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "model_max_length": 262144,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}
QWEN_ENDS = (248046, 248044)
"""Ids at which generation stops."""

GEMMA_TOKENS = {
    "<eos>": 1,
    "<bos>": 2,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
    "<|image>": 255999,
    "<|image|>": 258880,
    "<|audio|>": 258881,
    "<image|>": 258882,
}
GEMMA_ENDS = (1, 106, 50)
NEMOTRON_ENDS = (2, 11)
