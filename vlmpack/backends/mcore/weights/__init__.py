"""Weight maps between transformers and Megatron, and what Megatron is told about each family."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpack.backends.mcore.weights.base import FlatBox, Piece, flat_boxes, stack_pieces
from vlmpack.backends.mcore.weights.qwen import QwenLanguageMap
from vlmpack.errors import CapabilityError


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFamily:
    """What the mcore engine knows of a family beside its transformers config.

    Args:
        qkv_bias: whether the query, key and value projections have biases.
        qk_norm: whether queries and keys are normalised per head before the rotation.
        interleaved_rope: how position axes share the rotary frequencies; see `RopeLayout`.
        file_prefixes: (transformers' prefix, prefix in published weight files), first match wins.
        transposed_in_files: last parts of names whose published tensors have their last two
            dimensions swapped.
    """

    qkv_bias: bool
    qk_norm: bool
    interleaved_rope: bool
    file_prefixes: tuple[tuple[str, str], ...] = ()
    transposed_in_files: tuple[str, ...] = ()


_QWEN2 = MegatronFamily(
    qkv_bias=True,
    qk_norm=False,
    interleaved_rope=False,
    file_prefixes=(("model.visual.", "visual."), ("model.language_model.", "model.")),
)

_FAMILIES: dict[str, MegatronFamily] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": MegatronFamily(
        qkv_bias=False,
        qk_norm=True,
        interleaved_rope=True,
        transposed_in_files=("experts.gate_up_proj", "experts.down_proj"),
    ),
}


def megatron_family(name: str) -> MegatronFamily:
    """The family's entry.

    Raises:
        CapabilityError: the mcore engine does not run this family.
    """
    if name not in _FAMILIES:
        raise CapabilityError(
            f"the mcore engine does not run the family {name!r}, it runs "
            f"{', '.join(sorted(_FAMILIES))}; use model.backend: hf"
        )
    return _FAMILIES[name]


__all__ = [
    "FlatBox",
    "MegatronFamily",
    "Piece",
    "QwenLanguageMap",
    "flat_boxes",
    "megatron_family",
    "stack_pieces",
]
