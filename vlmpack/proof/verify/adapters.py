"""Gradients of adapters. The stock model has none, but its gradients say what theirs must be.

An adapted layer computes with W + s B A, and an adapter starts at B = 0, where the model is the
stock one: so dB = s dW A^T and dA = 0, with dW the stock model's gradient of the whole weight and
s what the recipe's alpha and rank come to. DoRA scales each row of that weight to a length m that
starts as |W|: dm is the part of dW along the row, and dB stays (2402.09353; its norm is held
constant).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmpack.backends.adapter_folder import ADAPTER
from vlmpack.backends.hf.adapters import BASE, scaling_of
from vlmpack.backends.policy import is_adapter
from vlmpack.proof.measure import Check, GradientError, gradient_errors
from vlmpack.proof.verify.compare import Compared
from vlmpack.proof.verify.gradients import check_gradients
from vlmpack.recipe.trainable import LoraSection

WEIGHT_A = f".lora_A.{ADAPTER}.weight"
WEIGHT_B = f".lora_B.{ADAPTER}.weight"
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """What the engine knew of its adapters before the optimizer step, on CPU; empty without any.

    Args:
        weights: their own, and under DoRA those of the layers they are beside.
        gradients: their own.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module | None, lora: LoraSection | None) -> AdapterRun:
        """Between `finish_gradients` and `step`. Collective.

        Args:
            model: transformers' with adapters inside; None where the engine has its own.
            lora: the adapters' settings.
        """
        found = cls()
        if model is None or lora is None:
            return found
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                gradient = parameter.grad
                zero = parameter.detach() * 0.0
                found.weights[name] = _whole(parameter)
                found.gradients[name] = _whole(zero if gradient is None else gradient)
            elif lora.dora and name.endswith(f"{BASE}weight"):
                found.weights[name] = _whole(parameter)
        return found


def _whole(value: Any) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    whole: Tensor = value.detach().float().cpu().clone()
    return whole


def expected_gradients(
    weights: Mapping[str, Tensor], stock: Mapping[str, Tensor], lora: LoraSection
) -> dict[str, Tensor]:
    """Those of adapters at their start, from the stock model's.

    Args:
        weights: see `AdapterRun`.
        stock: gradients of whole weights, under transformers' names.
        lora: the adapters' settings.
    """
    found = {}
    for name, value in weights.items():
        layer, beside, _ = name.partition(".lora_")
        if not beside:
            continue
        whole = stock[f"{layer}.weight"].double()
        if name.endswith(WEIGHT_A):
            expected = 0.0 * value.double()
        elif name.endswith(WEIGHT_B):
            expected = scaling_of(lora) * (whole @ weights[layer + WEIGHT_A].double().T)
        else:
            assert name.endswith(MAGNITUDE)
            base = weights[f"{layer}{BASE}weight"].double()
            expected = (whole * base).sum(1) / base.norm(dim=1)
        found[name] = expected.float()
    return found


def check_adapters(
    compared: Compared,
    run: AdapterRun,
    lora: LoraSection | None,
    own: Mapping[str, GradientError],
) -> list[Check]:
    """The row's gradients of adapters; no check without any.

    Args:
        own: errors of the unpacked run against itself, of the weights that adapters are beside.
    """
    if lora is None or not run.gradients:
        return []
    expected = expected_gradients(run.weights, compared.reference.gradients, lora)
    errors = gradient_errors(expected, run.gradients.items())
    noise = {
        name: GradientError(
            own[name.partition(".lora_")[0] + ".weight"].relative ** 2 * error.scale, error.scale
        )
        for name, error in errors.items()
    }
    return check_gradients(compared, errors, noise, dict.fromkeys(errors, "adapters"), {})
