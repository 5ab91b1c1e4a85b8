"""Which of a stage's parameters are trained: the policy, asked by transformers' names."""

from __future__ import annotations

from collections.abc import Iterable

from vlmpack.backends.mcore.layout import LocalParameter
from vlmpack.backends.mcore.optimizer import LR_SCALE
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.errors import CapabilityError
from vlmpack.families.base import ModulePaths


def refuse_adapters(policy: TrainingPolicy, *, transformer_engine: bool) -> None:
    """Raise CapabilityError for adapters that this engine has none of."""
    lora = policy.lora
    if lora is None:
        return
    wrong = {
        f"trainable.lora.dropout is {lora.dropout}": lora.dropout > 0,
        f"trainable.lora.quantize is {lora.quantize}": lora.quantize != "none",
        "model.attention is transformer_engine": transformer_engine,
    }
    for found in (what for what, is_wrong in wrong.items() if is_wrong):
        raise CapabilityError(f"{found}: adapters of the mcore engine cannot have that")


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
