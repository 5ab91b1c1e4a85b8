"""FLOPs of transformers models, from config.json alone.

A linear layer costs 2 FLOPs per weight and token. Attention costs 4 per pair of positions and
channel, with half of the pairs where it is causal. A training step costs three forward passes.
Norms, biases, activations, rotations and the embedding table are left out, as in PaLM's formula
(2204.02311, B).

Recurrences are counted as `vlmpack/recurrence` computes them, in chunks of C slots. That is
products within a chunk, and with the state that enters it. For a head with keys of K and values of
V channels, the multiplications per token are:

    delta rule    2 C K + C V + 3 K V    k k^T and q k^T, their use, and the state read, changed and
                                         written. The triangular solve, C (K + V) / 2, is left out
    SSD           C V + 2 K V            and C K for each group that shares its keys

Short convolutions are left out, as norms and activations are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlmpack.errors import ModelError
from vlmpack.packing import CostModel

STEP = 3
"""A training step over a forward pass: the backward pass computes two products for each one."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A vision transformer's shape; sizes in weights of linear layers.

    Args:
        weights: that a patch passes through: all blocks, the patch embedding, and its part of what
            class tokens pass through.
        merger_weights: of the projectors, for each token that they make.
        patches_per_token: patches that one token is made of.
    """

    width: int
    weights: float
    full_layers: int
    window_layers: int = 0
    window_patches: float = 0
    merger_weights: int = 0
    patches_per_token: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder's shape; its head is not part of it.

    Args:
        weights: that a token passes through in all layers, with only the experts that it chooses.
            Each multiplication of a recurrence counts as one.
        attention_width: channels of the heads of all layers with attention, or the mean where a
            head's keys and values differ in width.
    """

    weights: int
    attention_width: float


def cost_model(
    config: Config, tower: Tower | None = None, decoder: Decoder | None = None
) -> CostModel:
    """The cost of a decoder, with or without a vision tower.

    Args:
        decoder: None for attention and an MLP, or experts, in every layer.

    Raises:
        ModelError: a size is missing from `config`.
    """
    text = config.get("text_config", config)
    decoder = decoder or _attention_decoder(text)
    head = size(text, "hidden_size") * size(text, "vocab_size")
    language = CostModel(
        per_token=STEP * 2.0 * decoder.weights,
        per_squared_length=STEP * 2.0 * decoder.attention_width,
        per_label_token=STEP * 2.0 * head,
    )
    if tower is None:
        return language
    windows = 4.0 * tower.width * tower.window_layers * tower.window_patches
    merger = 2.0 * tower.merger_weights / tower.patches_per_token
    return replace(
        language,
        per_patch=STEP * (2.0 * tower.weights + windows + merger),
        per_squared_patches=STEP * 4.0 * tower.width * tower.full_layers,
    )


def tiled_tower(
    vision: Config,
    *,
    merger_weights: int,
    patches_per_token: int = 1,
    sides: tuple[int, int] | None = None,
    class_tokens: int = 0,
) -> Tower:
    """A tower that sees one tile at a time, of the size of its training images.

    Args:
        sides: of a tile and of a patch in pixels, where the configuration has lists.
        class_tokens: class tokens of a tile, not counted among its patches.
    """
    width, depth = size(vision, "hidden_size"), size(vision, "num_hidden_layers")
    tile, patch = sides or (size(vision, "image_size"), size(vision, "patch_size"))
    patches = (tile // patch) ** 2
    block = 4 * width**2 + 2 * width * size(vision, "intermediate_size")
    return Tower(
        width=width,
        weights=depth * block * (patches + class_tokens) / patches + width * 3 * patch**2,
        full_layers=0,
        window_layers=depth,
        window_patches=(patches + class_tokens) ** 2 / patches,
        merger_weights=merger_weights,
        patches_per_token=patches_per_token,
    )


def size(config: Config, key: str) -> int:
    """A size from a configuration.

    Raises:
        ModelError: missing or not a positive integer.
    """
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json: {key} is {value!r} in the part of model_type "
            f"{config.get('model_type')!r}, expected a positive integer. The cost of a row follows "
            f"from it"
        )
    return value


def _attention_decoder(text: Config) -> Decoder:
    """One with attention in every layer; of the experts a token passes those that it chooses, and
    those that all share."""
    width, heads = size(text, "hidden_size"), size(text, "num_attention_heads")
    layers = size(text, "num_hidden_layers")
    routed = _routed_layers(text, layers)
    mlps = 0
    if routed < layers:
        mlps += (layers - routed) * 3 * width * size(text, "intermediate_size")
    if routed:
        expert = 3 * width * size(text, "moe_intermediate_size")
        chosen = size(text, "num_experts_per_tok") + (text.get("n_shared_experts") or 0)
        mlps += routed * (chosen * expert + width * _experts(text))
    return Decoder(
        weights=layers * _attention_weights(text) + mlps,
        attention_width=layers * heads * _head_dim(text, width, heads),
    )


def _head_dim(text: Config, width: int, heads: int) -> float:
    """Channels of a head; the mean of a key's and a value's where they differ."""
    if text.get("kv_lora_rank"):
        query = size(text, "qk_nope_head_dim") + size(text, "qk_rope_head_dim")
        return (query + size(text, "v_head_dim")) / 2
    return text.get("head_dim") or width // heads


def _attention_weights(text: Config) -> int:
    """The weights of one layer's projections around attention."""
    width, heads = size(text, "hidden_size"), size(text, "num_attention_heads")
    if text.get("kv_lora_rank"):
        return _latent_weights(text, width, heads)
    head_dim = text.get("head_dim") or width // heads
    groups = text.get("num_key_value_heads") or heads
    return 2 * width * head_dim * (heads + groups)


def _latent_weights(text: Config, width: int, heads: int) -> int:
    """The weights of latent attention, where all pass narrow layers (2405.04434, section 2.1)."""
    nope, rope = size(text, "qk_nope_head_dim"), size(text, "qk_rope_head_dim")
    values, narrow = size(text, "v_head_dim"), size(text, "kv_lora_rank")
    queries = heads * (nope + rope)
    rank = text.get("q_lora_rank")
    return (
        (rank * (width + queries) if rank else width * queries)
        + width * (narrow + rope)
        + narrow * heads * (nope + values)
        + heads * values * width
    )


def _experts(text: Config) -> int:
    """0 in a dense decoder. Published files say `num_experts`, what transformers 5 saves the other
    name; families have names of their own."""
    return _first(text, "num_experts", "num_local_experts", "n_routed_experts")


def _first(text: Config, *keys: str) -> int:
    """The first of these that is there and not 0; 0 where none is."""
    return next((int(text[key]) for key in keys if text.get(key)), 0)


def _routed_layers(text: Config, layers: int) -> int:
    """Layers with experts. These are the listed ones, or every `decoder_sparse_step`-th without the
    first ones and those named as dense."""
    if not _experts(text):
        return 0
    kinds = text.get("mlp_layer_types")
    if kinds:
        return sum(kind == "sparse" for kind in kinds)
    step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or ()
    first = text.get("first_k_dense_replace") or 0
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(first, layers))


CHUNK = 64
"""C: that of the kernels for CUDA and of the torch forms there."""


def qwen3_5_decoder(text: Config) -> Decoder:
    """A decoder of Qwen3.5: GatedDeltaNet or gated attention in front of an MLP, or of experts and
    a shared one behind a gate.

    Raises:
        ModelError: a size is missing from it.
    """
    width, heads, head_dim = (
        size(text, key) for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    attention = width * head_dim * (3 * heads + 2 * size(text, "num_key_value_heads"))
    kinds = text["layer_types"]
    full = kinds.count("full_attention")
    if text.get("num_experts"):
        chosen = size(text, "num_experts_per_tok") * size(text, "moe_intermediate_size")
        shared = size(text, "shared_expert_intermediate_size")
        mlp = 3 * width * (chosen + shared) + width * (size(text, "num_experts") + 1)
    else:
        mlp = 3 * width * size(text, "intermediate_size")
    weights = full * attention + (len(kinds) - full) * _gated_delta_net(text) + len(kinds) * mlp
    return Decoder(weights=weights, attention_width=full * heads * head_dim)


def _gated_delta_net(text: Config) -> int:
    width = size(text, "hidden_size")
    heads, key_heads = size(text, "linear_num_value_heads"), size(text, "linear_num_key_heads")
    k, v = size(text, "linear_key_head_dim"), size(text, "linear_value_head_dim")
    projections = width * (2 * key_heads * k + 3 * heads * v + 2 * heads)
    return projections + heads * (2 * CHUNK * k + CHUNK * v + 3 * k * v)


def nemotron_h_decoder(text: Config) -> Decoder:
    """A decoder of Nemotron-H: a layer is a Mamba-2, attention, an MLP without a gate, or experts.

    Raises:
        ModelError: a size is missing from it.
    """
    width, heads, head_dim = (
        size(text, key) for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    kinds = text["layers_block_type"]
    weights = {
        "linear_attention": _mamba_2(text),
        "full_attention": 2 * width * head_dim * (heads + size(text, "num_key_value_heads")),
        "mlp": 2 * width * size(text, "intermediate_size"),
        "moe": _latent_experts(text) if "moe" in kinds else 0,
    }
    return Decoder(
        weights=sum(weights[kind] for kind in kinds),
        attention_width=kinds.count("full_attention") * heads * head_dim,
    )


def _mamba_2(text: Config) -> int:
    width = size(text, "hidden_size")
    heads, v = size(text, "mamba_num_heads"), size(text, "mamba_head_dim")
    groups, k = size(text, "n_groups"), size(text, "ssm_state_size")
    inner = heads * v
    projections = width * (2 * inner + 2 * groups * k + heads) + inner * width
    return projections + heads * (CHUNK * v + 2 * k * v) + groups * CHUNK * k


def _latent_experts(text: Config) -> int:
    width = size(text, "hidden_size")
    latent = text.get("moe_latent_size")
    chosen = size(text, "num_experts_per_tok") * size(text, "moe_intermediate_size")
    shared = size(text, "moe_shared_expert_intermediate_size")
    around = 2 * width * latent if latent else 0
    routed = 2 * (latent or width) * chosen + width * size(text, "n_routed_experts")
    return routed + around + 2 * width * shared
