"""The sizes and the map of a language model, by its family."""

from __future__ import annotations

from typing import Any

from vlmpack.backends.mcore.weights import MegatronFamily
from vlmpack.backends.mcore.weights.dims import LanguageDims
from vlmpack.backends.mcore.weights.nemotron_h import NemotronHMap, nemotron_h_dims
from vlmpack.backends.mcore.weights.qwen import QwenLanguageMap
from vlmpack.families.base import ModulePaths
from vlmpack.recipe.schema import ParallelismSection


def language_dims(config: Any, family: MegatronFamily) -> LanguageDims:
    """Sizes from a transformers config, that of a language model alone included.

    Raises:
        CapabilityError: a feature that the mcore engine does not build.
    """
    if family.one_part_layers:
        return nemotron_h_dims(config, family)
    return LanguageDims.from_transformers(config, family)


def language_map(
    paths: ModulePaths,
    dims: LanguageDims,
    sizes: ParallelismSection,
    *,
    tp_rank: int,
    ep_rank: int = 0,
) -> QwenLanguageMap:
    """The pieces of one rank's parameters."""
    made = NemotronHMap if dims.kinds else QwenLanguageMap
    return made(
        prefix=paths.language + ".",
        dims=dims,
        sizes=sizes,
        tp_rank=tp_rank,
        ep_rank=ep_rank,
        head=paths.head or "lm_head",
    )
