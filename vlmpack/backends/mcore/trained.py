"""Which of a stage's parameters are trained: the policy, asked by transformers' names."""

from __future__ import annotations

from collections.abc import Iterable

from vlmpack.backends.mcore.layout import LocalParameter
from vlmpack.backends.mcore.optimizer import LR_SCALE
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.errors import CapabilityError
from vlmpack.families.base import ModulePaths


def refuse_adapters(policy: TrainingPolicy) -> None:
    """Raise CapabilityError for a policy with LoRA."""
    if policy.lora is not None:
        raise CapabilityError(
            "the mcore engine trains whole weights, no adapters; use model.backend: hf for LoRA"
        )


def mark_trained(
    parameters: Iterable[LocalParameter], policy: TrainingPolicy, paths: ModulePaths
) -> None:
    """Set `requires_grad` of a stage's parameters, and their learning rate's factor.

    The pieces of a parameter (queries, keys and values, say) are of one component.
    """
    for local in parameters:
        parameter = local.parameter
        said = {
            policy.of_parameter(piece.box.name, parameter.ndim, paths) for piece in local.pieces
        }
        assert len(said) == 1
        (only,) = said
        parameter.requires_grad_(only.trains)
        setattr(parameter, LR_SCALE, only.lr_scale)
