"""Features, engines, and what an engine cannot do whatever the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Engine = Literal["hf", "mcore"]
Feature = Literal[
    "in_batch", "online", "offline", "CP", "TP", "SP", "PP", "EP", "LoRA", "DPO", "CUDA graphs"
]

ENGINES: tuple[Engine, ...] = get_args(Engine)
FEATURES: tuple[Feature, ...] = get_args(Feature)


@dataclass(frozen=True, slots=True)
class Limit:
    """Why something cannot be done.

    Args:
        would_do: the knob, package or version with which it can be done; empty where none is known.
    """

    reason: str
    would_do: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.would_do}" if self.would_do else self.reason


@dataclass(frozen=True, slots=True)
class OnlyAttention:
    """The implementations of packed attention that can run a model, where not all can.

    Args:
        names: values of `model.attention`, in addition to `auto`.
    """

    names: tuple[str, ...]
    reason: str


NO_EXPERTS = Limit("has no experts")

NOT_ON_MCORE = Limit("has no weight map to megatron-core yet", "use model.backend: hf")

ONLY_ON_MCORE = Limit(NOT_ON_MCORE.reason, "the other engine cannot do this with any model")

MCORE_FEATURES: tuple[Feature, ...] = ("TP", "SP", "PP", "EP")
"""What megatron-core alone can do."""

_NEEDS_MCORE = Limit("needs model.backend: mcore")
ENGINE_LIMITS: Mapping[Engine, Mapping[Feature, Limit]] = {
    "hf": dict.fromkeys(MCORE_FEATURES, _NEEDS_MCORE),
    "mcore": {},
}
"""What an engine cannot do with any model."""
