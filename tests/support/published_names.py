"""Names and shapes of the tensors that are published, by model, and a file with such a header and
no values. Their sources are named in `published_hybrids.py`, `published_gemma4.py` and
`published_qwen3_vl.py`.

What is written here are kinds: what a layer of each kind has. The totals that were published beside
them (tensors, bytes, parameters) are compared with what follows, so that no kind is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.published_gemma4 import CONFIGS, FULL
from support.published_hybrids import (
    NEMOTRON_3_5_LIGHTNING,
    NEMOTRON_3_NANO,
    QWEN3_5_0_8B,
    QWEN3_6_27B,
    QWEN3_6_35B,
    QWEN3_8_2_4T,
)
from support.published_qwen3_vl import QWEN3_VL_8B

Shapes = dict[str, list[int]]


def _qwen(config: Mapping[str, Any]) -> Shapes:
    """Qwen3.5 to 3.8, with a tower or without."""
    text = config.get("text_config", config)
    width, head = text["hidden_size"], text["head_dim"]
    heads, keys = (text[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    attention = {
        "self_attn.k_norm.weight": [head],
        "self_attn.k_proj.weight": [keys * head, width],
        "self_attn.o_proj.weight": [width, heads * head],
        "self_attn.q_norm.weight": [head],
        "self_attn.q_proj.weight": [2 * heads * head, width],
        "self_attn.v_proj.weight": [keys * head, width],
    }
    kinds = {"full_attention": attention, "linear_attention": _qwen_linear(text)}
    mlp = _qwen_experts(text) if "num_experts" in text else _gated_mlp("mlp.", text, width)
    mlp |= {f"{place}_layernorm.weight": [width] for place in ("input", "post_attention")}
    before = "model.language_model." if "text_config" in config else "model."
    names: Shapes = {
        f"{before}embed_tokens.weight": [text["vocab_size"], width],
        f"{before}norm.weight": [width],
        "mtp.fc.weight": [width, 2 * width],
        "mtp.norm.weight": [width],
        "mtp.pre_fc_norm_embedding.weight": [width],
        "mtp.pre_fc_norm_hidden.weight": [width],
    }
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = [text["vocab_size"], width]
    for number, kind in enumerate(text["layer_types"]):
        _add(names, f"{before}layers.{number}.", {**mlp, **kinds[kind]})
    _add(names, "mtp.layers.0.", {**mlp, **attention})
    if "vision_config" in config:
        _add(names, "model.visual.", _qwen_tower(config["vision_config"]))
    return names


def _qwen_linear(text: Mapping[str, Any]) -> Shapes:
    width, heads = text["hidden_size"], text["linear_num_value_heads"]
    inner = heads * text["linear_value_head_dim"]
    mixed = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + inner
    return {
        "linear_attn.A_log": [heads],
        "linear_attn.conv1d.weight": [mixed, 1, text["linear_conv_kernel_dim"]],
        "linear_attn.dt_bias": [heads],
        "linear_attn.in_proj_a.weight": [heads, width],
        "linear_attn.in_proj_b.weight": [heads, width],
        "linear_attn.in_proj_qkv.weight": [mixed, width],
        "linear_attn.in_proj_z.weight": [inner, width],
        "linear_attn.norm.weight": [text["linear_value_head_dim"]],
        "linear_attn.out_proj.weight": [width, inner],
    }


def _gated_mlp(prefix: str, text: Mapping[str, Any], width: int, *, key: str = "") -> Shapes:
    columns = text[key or "intermediate_size"]
    return {
        f"{prefix}down_proj.weight": [width, columns],
        f"{prefix}gate_proj.weight": [columns, width],
        f"{prefix}up_proj.weight": [columns, width],
    }


def _qwen_experts(text: Mapping[str, Any]) -> Shapes:
    width, number, each = (
        text[key] for key in ("hidden_size", "num_experts", "moe_intermediate_size")
    )
    return {
        "mlp.experts.down_proj": [number, width, each],
        "mlp.experts.gate_up_proj": [number, 2 * each, width],
        "mlp.gate.weight": [number, width],
        "mlp.shared_expert_gate.weight": [1, width],
        **_gated_mlp("mlp.shared_expert.", text, width, key="shared_expert_intermediate_size"),
    }


def _qwen_tower(vision: Mapping[str, Any]) -> Shapes:
    width, mlp, last = (vision[k] for k in ("hidden_size", "intermediate_size", "out_hidden_size"))
    merged = vision["spatial_merge_size"] ** 2 * width
    block: Shapes = {
        "attn.proj.bias": [width],
        "attn.proj.weight": [width, width],
        "attn.qkv.bias": [3 * width],
        "attn.qkv.weight": [3 * width, width],
        "mlp.linear_fc1.bias": [mlp],
        "mlp.linear_fc1.weight": [mlp, width],
        "mlp.linear_fc2.bias": [width],
        "mlp.linear_fc2.weight": [width, mlp],
        **{f"norm{n}.{end}": [width] for n in (1, 2) for end in ("bias", "weight")},
    }
    edge = vision["patch_size"]
    names: Shapes = {
        "merger.linear_fc1.bias": [merged],
        "merger.linear_fc1.weight": [merged, merged],
        "merger.linear_fc2.bias": [last],
        "merger.linear_fc2.weight": [last, merged],
        "merger.norm.bias": [width],
        "merger.norm.weight": [width],
        "patch_embed.proj.bias": [width],
        "patch_embed.proj.weight": [width, 3, vision["temporal_patch_size"], edge, edge],
        "pos_embed.weight": [vision["num_position_embeddings"], width],
    }
    for number in range(vision["depth"]):
        _add(names, f"blocks.{number}.", block)
    return names


def _qwen3_vl(config: Mapping[str, Any]) -> Shapes:
    """Attention in each layer, and mergers of what enters behind the first ones (DeepStack)."""
    text, vision = config["text_config"], config["vision_config"]
    width, head, heads = (text[k] for k in ("hidden_size", "head_dim", "num_attention_heads"))
    keys, merged = text["num_key_value_heads"], 4 * vision["hidden_size"]
    layer: Shapes = {
        "self_attn.k_norm.weight": [head],
        "self_attn.k_proj.weight": [keys * head, width],
        "self_attn.o_proj.weight": [width, heads * head],
        "self_attn.q_norm.weight": [head],
        "self_attn.q_proj.weight": [heads * head, width],
        "self_attn.v_proj.weight": [keys * head, width],
        **_gated_mlp("mlp.", text, width),
        **{f"{place}_layernorm.weight": [width] for place in ("input", "post_attention")},
    }
    names: Shapes = {
        "lm_head.weight": [text["vocab_size"], width],
        "model.language_model.embed_tokens.weight": [text["vocab_size"], width],
        "model.language_model.norm.weight": [width],
    }
    for number in range(text["num_hidden_layers"]):
        _add(names, f"model.language_model.layers.{number}.", layer)
    tower = _qwen_tower(vision)
    merger = {n.removeprefix("merger."): s for n, s in tower.items() if n.startswith("merger.")}
    merger |= {f"norm.{end}": [merged] for end in ("bias", "weight")}  # behind the merge
    for number in range(len(vision["deepstack_visual_indexes"])):
        _add(tower, f"deepstack_merger_list.{number}.", merger)
    _add(names, "model.visual.", tower)
    return names


def _nemotron() -> Shapes:
    """Nemotron-3-Nano-30B-A3B."""
    kinds: dict[str, Shapes] = {
        "M": {
            "A_log": [64],
            "D": [64],
            "conv1d.bias": [6144],
            "conv1d.weight": [6144, 1, 4],
            "dt_bias": [64],
            "in_proj.weight": [10304, 2688],
            "norm.weight": [4096],
            "out_proj.weight": [2688, 4096],
        },
        "*": _NEMOTRON_ATTENTION,
        "E": _nemotron_experts(),
    }
    names: Shapes = {
        "backbone.embeddings.weight": [131072, 2688],
        "backbone.norm_f.weight": [2688],
        "lm_head.weight": [131072, 2688],
    }
    for number, kind in enumerate(NEMOTRON_3_NANO["hybrid_override_pattern"]):
        names[f"backbone.layers.{number}.norm.weight"] = [2688]
        _add(names, f"backbone.layers.{number}.mixer.", kinds[kind])
    return names


_NEMOTRON_ATTENTION: Shapes = {
    "k_proj.weight": [256, 2688],
    "o_proj.weight": [2688, 4096],
    "q_proj.weight": [4096, 2688],
    "v_proj.weight": [256, 2688],
}


def _nemotron_experts() -> Shapes:
    names: Shapes = {
        "gate.e_score_correction_bias": [128],
        "gate.weight": [128, 2688],
        "shared_experts.down_proj.weight": [2688, 3712],
        "shared_experts.up_proj.weight": [3712, 2688],
    }
    for number in range(128):
        names[f"experts.{number}.down_proj.weight"] = [2688, 1856]
        names[f"experts.{number}.up_proj.weight"] = [1856, 2688]
    return names


def _nemotron_with_prediction() -> Shapes:
    """Nemotron-3.5-Lightning-30B-A3B: attention, then experts, guess one token more."""
    names = _nemotron()
    first, second = "mtp.layers.0.", "mtp.layers.1."
    ends = {"enorm.weight": [2688], "hnorm.weight": [2688], "eh_proj.weight": [2688, 5376]}
    _add(names, first, {**ends, "norm.weight": [2688]})
    _add(names, second, {"norm.weight": [2688], "final_layernorm.weight": [2688]})
    _add(names, f"{first}mixer.", _NEMOTRON_ATTENTION)
    _add(names, f"{second}mixer.", _nemotron_experts())
    return names


def _gemma(name: str) -> Shapes:
    """Gemma 4 without its audio tower: what a layer reuses from an earlier one is stored too."""
    config = CONFIGS[name]
    text = config["text_config"]
    width, beside = text["hidden_size"], text["hidden_size_per_layer_input"]
    names: Shapes = {"embed_tokens.weight": [262144, width], "norm.weight": [width]}
    if beside:
        whole = beside * text["num_hidden_layers"]
        names |= {
            "embed_tokens_per_layer.weight": [262144, whole],
            "per_layer_model_projection.weight": [whole, width],
            "per_layer_projection_norm.weight": [beside],
        }
    for number, kind in enumerate(text["layer_types"]):
        _add(names, f"layers.{number}.", _gemma_layer(text, number, full=kind == FULL))
    found: Shapes = {}
    _add(found, "model.language_model.", names)
    _add(found, "model.vision_tower.", _gemma_tower(config["vision_config"]))
    projector = [width, config["vision_config"]["hidden_size"]]
    return {**found, "model.embed_vision.embedding_projection.weight": projector}


def _gemma_layer(text: Mapping[str, Any], number: int, *, full: bool) -> Shapes:
    width, head = text["hidden_size"], 512 if full else 256
    same = full and text["attention_k_eq_v"]
    keys = head * (text["num_global_key_value_heads"] if same else text["num_key_value_heads"])
    shared = number >= text["num_hidden_layers"] - text["num_kv_shared_layers"]
    mlp = text["intermediate_size"] * (2 if shared and text["use_double_wide_mlp"] else 1)
    around = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    names: Shapes = {
        **{f"{place}_layernorm.weight": [width] for place in around},
        "layer_scalar": [1],
        "mlp.down_proj.weight": [width, mlp],
        "mlp.gate_proj.weight": [mlp, width],
        "mlp.up_proj.weight": [mlp, width],
        "self_attn.k_norm.weight": [head],
        "self_attn.k_proj.weight": [keys, width],
        "self_attn.o_proj.weight": [width, head * text["num_attention_heads"]],
        "self_attn.q_norm.weight": [head],
        "self_attn.q_proj.weight": [head * text["num_attention_heads"], width],
    }
    if not same:
        names["self_attn.v_proj.weight"] = [keys, width]
    if beside := text["hidden_size_per_layer_input"]:
        names |= {
            "per_layer_input_gate.weight": [beside, width],
            "per_layer_projection.weight": [width, beside],
            "post_per_layer_input_norm.weight": [width],
        }
    if text["enable_moe_block"]:
        each, number_of = text["moe_intermediate_size"], text["num_experts"]
        further = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1")
        names |= {
            **{f"{place}.weight": [width] for place in further},
            "post_feedforward_layernorm_2.weight": [width],
            "experts.down_proj": [number_of, width, each],
            "experts.gate_up_proj": [number_of, 2 * each, width],
            "router.per_expert_scale": [number_of],
            "router.proj.weight": [number_of, width],
            "router.scale": [width],
        }
    return names


def _gemma_tower(vision: Mapping[str, Any]) -> Shapes:
    width, mlp = vision["hidden_size"], vision["intermediate_size"]
    linear = {f"self_attn.{one}_proj": [width, width] for one in "qkvo"}
    linear |= {"mlp.gate_proj": [mlp, width], "mlp.up_proj": [mlp, width]}
    linear |= {"mlp.down_proj": [width, mlp]}
    around = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    layer: Shapes = {f"{place}_layernorm.weight": [width] for place in around}
    layer |= {f"self_attn.{one}_norm.weight": [vision["head_dim"]] for one in "qk"}
    for name, shape in linear.items():
        layer[f"{name}.linear.weight"] = shape
        if vision["use_clipped_linears"]:
            ends = [f"{side}_{end}" for side in ("input", "output") for end in ("min", "max")]
            layer |= {f"{name}.{end}": [] for end in ends}
    names: Shapes = {
        "patch_embedder.input_proj.weight": [width, 3 * vision["patch_size"] ** 2],
        "patch_embedder.position_embedding_table": [2, vision["position_embedding_size"], width],
    }
    if vision["standardize"]:
        names |= {"std_bias": [width], "std_scale": [width]}
    for number in range(vision["num_hidden_layers"]):
        _add(names, f"encoder.layers.{number}.", layer)
    return names


def _add(names: Shapes, prefix: str, own: Mapping[str, list[int]]) -> None:
    names |= {f"{prefix}{name}": shape for name, shape in own.items()}


def text_form(config: Mapping[str, Any], names: Shapes) -> tuple[dict[str, Any], Shapes]:
    """The language model of a model with a tower, as a folder of its own would have it."""
    text = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
    kept = {
        name.replace("model.language_model.", "model."): shape
        for name, shape in names.items()
        if name.startswith(("model.language_model.", "lm_head.", "mtp."))
    }
    return text, kept


def published_names() -> dict[str, Shapes]:
    """By model; of E2B and E4B without what their audio tower has."""
    return {
        **{name: _qwen(config) for name, config in QWEN_CONFIGS.items()},
        "Qwen3-VL-8B": _qwen3_vl(QWEN3_VL_8B),
        "Nemotron-3-Nano-30B-A3B": _nemotron(),
        "Nemotron-3.5-Lightning-30B-A3B": _nemotron_with_prediction(),
        **{f"Gemma-4-{name}": _gemma(name) for name in CONFIGS},
    }


def write_header(path: Path, shapes: Mapping[str, list[int]]) -> None:
    """A safetensors file of these tensors in bfloat16 that takes no disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + end)


QWEN_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": QWEN3_5_0_8B,
    "Qwen3.6-27B": QWEN3_6_27B,
    "Qwen3.6-35B-A3B": QWEN3_6_35B,
    "Qwen3.8-2.4T-A95B": QWEN3_8_2_4T,
}
PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = {
    **QWEN_CONFIGS,
    "Qwen3-VL-8B": QWEN3_VL_8B,
    "Nemotron-3-Nano-30B-A3B": NEMOTRON_3_NANO,
    "Nemotron-3.5-Lightning-30B-A3B": NEMOTRON_3_5_LIGHTNING,
    **{f"Gemma-4-{name}": config for name, config in CONFIGS.items()},
}
"""config.json by model."""
