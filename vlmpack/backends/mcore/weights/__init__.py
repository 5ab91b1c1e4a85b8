"""What Megatron must know of each model_type. `language` maps its weights."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpack.errors import CapabilityError


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFamily:
    """What the mcore engine knows of a model_type besides its transformers config.

    Args:
        interleaved_rope: how position axes share the rotary frequencies; see `RopeLayout`.
        norm_offset: added to the weights of norms, except the one after a delta rule.
        norm_rounds_first: whether norms round before they multiply by their weights.
        one_part_layers: whether a layer is only a mixer or only an MLP, as `layers_block_type` of
            config.json says; see `language`.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    interleaved_rope: bool = False
    output_gate: bool = False
    norm_offset: float = 0.0
    norm_rounds_first: bool = True
    one_part_layers: bool = False


_QWEN2_VL = MegatronFamily(qkv_bias=True)

_QWEN3_VL = MegatronFamily(qk_norm=True, interleaved_rope=True)

_QWEN3_5 = MegatronFamily(
    qk_norm=True,
    interleaved_rope=True,
    output_gate=True,
    norm_offset=1.0,
    norm_rounds_first=False,
)

_NEMOTRON_H = MegatronFamily(norm_rounds_first=False, one_part_layers=True)

FAMILIES: dict[str, MegatronFamily] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_omni": _NEMOTRON_H,
    "qwen2": MegatronFamily(qkv_bias=True),
    "qwen3": MegatronFamily(qk_norm=True),
    "llama": MegatronFamily(),
}
"""By `model_type`, every one that the mcore engine runs; `SERVED` says so too."""


def megatron_family(model_type: str) -> MegatronFamily:
    """The entry of a config.json's `model_type`.

    Raises:
        CapabilityError: the mcore engine does not run it.
    """
    if model_type not in FAMILIES:
        raise CapabilityError(
            f"the mcore engine does not run model_type {model_type!r}, it runs "
            f"{', '.join(sorted(FAMILIES))}; use model.backend: hf"
        )
    return FAMILIES[model_type]
