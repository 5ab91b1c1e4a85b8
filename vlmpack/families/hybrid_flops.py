"""FLOPs of decoders whose layers are of several kinds: layers that carry state, attention, experts.

The recurrences are counted as `vlmpack/recurrence` computes them, in chunks of C slots: products
within a chunk, and with the state that enters it. Of a head with keys of K and values of V
channels, for each token, in multiplications like those of a weight:

    delta rule    2 C K + C V + 3 K V    k k^T and q k^T, their use, and the state read, changed and
                                         written; the triangular solve, C (K + V) / 2, is left out
    SSD           C V + 2 K V            and C K for each group that shares its keys

Short convolutions are left out, as norms and activations are.
"""

from __future__ import annotations

from vlmpack.families.flops import Config, Decoder, size

CHUNK = 64
"""C: that of the kernels for CUDA and of the torch forms there."""


def qwen3_5_decoder(text: Config) -> Decoder:
    """A decoder of Qwen3.5: GatedDeltaNet or gated attention in front of an MLP, or of experts and
    a shared one behind a gate.

    Args:
        text: its section, with the class's defaults.

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

    Args:
        text: its config, with the class's defaults.

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
