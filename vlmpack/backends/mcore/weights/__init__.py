"""Weight maps between transformers and Megatron, one per family that the mcore engine runs."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpack.backends.mcore.weights.base import FlatBox, Piece, flat_boxes, stack_pieces
from vlmpack.backends.mcore.weights.qwen2 import QwenLanguageMap
from vlmpack.errors import CapabilityError


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFamily:
    """What the mcore engine knows of a family beside its transformers config.

    Args:
        language_map: pieces of the language model's parameters.
        file_prefixes: (transformers' prefix, prefix in published weight files), first match wins.
    """

    language_map: type[QwenLanguageMap]
    file_prefixes: tuple[tuple[str, str], ...]


_FAMILIES: dict[str, MegatronFamily] = {
    "qwen2_5_vl": MegatronFamily(
        language_map=QwenLanguageMap,
        file_prefixes=(("model.visual.", "visual."), ("model.language_model.", "model.")),
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


__all__ = ["FlatBox", "MegatronFamily", "Piece", "flat_boxes", "megatron_family", "stack_pieces"]
