"""How the experts of a mixture are computed: one of transformers' forms, chosen once and reported.

    grouped_mm  tokens sorted by expert, one grouped matmul for all experts: exact and the fastest
    eager       a loop over the experts that are asked, whose backward fills all weights for each

The others are left out: batched_mm copies an expert's weights for every token that chose it (slower
than the loop, and out of memory at real sizes); deepgemm and sonicmoe fetch kernels from the Hub,
which is code, and nothing has compared them with the loop yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

ExpertsName = Literal["grouped_mm", "eager"]

_OURS = "vlmpack_grouped_mm"
"""What our form of grouped_mm is called among transformers' own."""


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """The form that runs, and why.

    Args:
        name: its name in transformers.
        reason: one phrase for the log.
    """

    name: ExpertsName
    reason: str


class InComputeDtype:
    """A module of experts as it is under autocast, which knows no grouped matmul: its weights in
    the compute dtype, everything else its own.

    Args:
        experts: transformers' module.
        dtype: to compute in.
    """

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value


def choose_experts(language: Any) -> ExpertsChoice | None:
    """Choose how a decoder's experts are computed; None where it has none that can be chosen for.

    Args:
        language: transformers' decoder.
    """
    if not any(True for _ in _experts(language)):
        return None
    try:
        language.get_correct_experts_implementation("grouped_mm")
    except (ValueError, ImportError) as error:
        return ExpertsChoice("eager", f"grouped_mm cannot run: {error}")
    return ExpertsChoice("grouped_mm", "first choice")


def settle_experts(language: Any) -> dict[str, str]:
    """Have a decoder's experts computed in the form that is chosen for it.

    Returns:
        What was chosen, for the log and the report; empty where there was nothing to choose.
    """
    choice = choose_experts(language)
    if choice is None:
        return {}
    language.set_experts_implementation(_registered(choice))
    return {"experts": f"{choice.name} ({choice.reason})"}


def expert_weights(model: nn.Module) -> list[Tensor]:
    """The matrices of experts, which any form multiplies in the compute dtype."""
    return [value for part in _experts(model) for value in part.parameters() if value.ndim > 2]


def _experts(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if hasattr(module, "_is_expert_parallel"))


def _registered(choice: ExpertsChoice) -> str:
    """The name under which transformers finds it."""
    if choice.name == "eager":
        return choice.name
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_OURS, grouped_experts)
    return _OURS


def grouped_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' grouped_mm, under autocast in the dtype that its loop computes in.

    Args:
        experts: the module that holds the experts' weights.
        hidden_states: (T, D).
        top_k_index: (T, K) int64, the experts of each token.
        top_k_weights: (T, K), what their outputs are weighed with.

    Returns:
        (T, D).
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        experts = InComputeDtype(experts, torch.get_autocast_dtype(device))
    output: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return output
