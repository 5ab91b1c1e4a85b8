"""A config of a class of transformers -> one of the same class whose model has small sizes.

    CONFIG_MAPPING["aria"]().to_dict()   {"text_config": {"hidden_size": 4096, ...}, ...}
    -> tiny                              {"text_config": {"hidden_size": 64, ...}, ...}

Sizes go by the names of entries, for sections of the tower and of the language model apart; what a
class wants beyond that stands in `vlmpack/proof/sweep/classes.py`. Every size is one that no other
could be mistaken for where the class leaves the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = 2

HIDDEN = 64

TILE = 56
"""Side of the images that a tower of fixed size is made for, in pixels."""

TEXT: Mapping[str, int] = {
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 4096,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "query_pre_attn_scalar": 24,
    "mamba_n_heads": 4,
    "n_mamba_heads": 4,
    "mamba_d_head": HIDDEN // 2,
    "mamba_headdim": HIDDEN // 2,
    "mamba_d_ssm": 2 * HIDDEN,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "state_size": 16,
    "chunk_size": 64,
    "adapter_rank": 8,
    "shared_intermediate_size": 32,
    "attention_hidden_size": 2 * HIDDEN,
    "attention_head_dim": HIDDEN // 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "block_ff_dim": 96,
    "n_embd": HIDDEN,
    "n_head": 4,
    "n_layer": LAYERS,
    "n_inner": 96,
    "n_positions": 4096,
    "num_layers": LAYERS,
    "num_heads": 4,
}
"""Sizes of the language model."""

VISION: Mapping[str, int] = {
    "hidden_size": 48,
    "embed_dim": 48,
    "d_model": 48,
    "intermediate_size": 80,
    "mlp_dim": 80,
    "depth": LAYERS,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "layers": LAYERS,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "out_hidden_size": HIDDEN,
    "text_hidden_size": HIDDEN,
    "output_dim": HIDDEN,
    "projection_dim": 32,
    "num_position_embeddings": 64,
    "image_size": TILE,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "window_size": TILE,
    "patch_embed_hidden_size": 48,
    "encoder_hidden_size": 48,
}
"""Sizes of the tower, and of what lies between the two."""

FORGOTTEN = (
    "id2label",
    "label2id",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "dtype",
)

KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")

LEFT_OUT = ("per_layer_config", "kv_source_layers", "no_rope_layers")
"""Entries about single layers of the many, without which a class does too."""


def tiny_config(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The content of a config.json with small sizes.

    Args:
        config: that of the class's defaults.
        vocab_size: of the tokenizer.
    """
    return _section(config, vocab_size, is_vision=False)


def _section(config: Mapping[str, Any], vocab_size: int, *, is_vision: bool) -> dict[str, Any]:
    sizes = VISION if is_vision else TEXT
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in FORGOTTEN or name in LEFT_OUT:
            continue
        if isinstance(value, Mapping) and name.endswith("_config"):
            other = any(part in name for part in ("vision", "vit", "qformer", "audio", "projector"))
            found[name] = _section(value, vocab_size, is_vision=other)
        elif name in ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"):
            found[name] = vocab_size
        elif name in sizes and _is_number(value):
            found[name] = sizes[name]
        elif name in KINDS and isinstance(value, list):
            found[name] = _kinds(value)
        elif _names_layers(name, value):
            found[name] = [0]
        else:
            found[name] = value
    if "kv_lora_rank" in found:  # latent attention has keys for every head
        found["num_key_value_heads"] = found["num_attention_heads"]
    _same_number_of_layers(found)
    if not is_vision:
        _rotary(found)
    return found


def _names_layers(name: str, value: Any) -> bool:
    listed = name.startswith("deepstack") or name.endswith(("_block_indexes", "_attn_indexes"))
    return listed and isinstance(value, list)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kinds(kinds: list[Any]) -> list[Any]:
    """One of each kind, as many as there are layers at least."""
    each = list(dict.fromkeys(kinds))
    return (each * LAYERS)[: max(LAYERS, len(each))]


def _same_number_of_layers(section: dict[str, Any]) -> None:
    """As many layers as kinds of them are listed."""
    listed = [name for name in KINDS if isinstance(section.get(name), list)]
    if not listed or "num_hidden_layers" not in section:
        return
    count = section["num_hidden_layers"] = max(len(section[name]) for name in listed)
    for name in listed:
        section[name] = (section[name] * count)[:count]


def _rotary(section: dict[str, Any]) -> None:
    """Sections of MRoPE that sum to half of a head; classes without it pass them over."""
    rope = section.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope or "hidden_size" not in section:
        return
    head = section.get("head_dim") or section["hidden_size"] // section["num_attention_heads"]
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    thirds = [half - 2 * (half // 3), half // 3, half // 3]
    section["rope_parameters"] = {**rope, "mrope_section": thirds}
