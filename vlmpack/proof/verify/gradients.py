"""Gradients against the stock model's, by part of the model, adapters included.

The stock model has no adapters, but its gradients determine theirs. An adapted layer computes with
W + s B A and starts at B = 0, so dB = s dW A^T and dA = 0. Here dW is the stock model's gradient of
the whole weight, and s follows from the recipe's alpha and rank. DoRA (2402.09353) scales each row
of that weight to a length m that starts as |W|. Its norm is held constant. Then dm is the part of
dW along the row, and dB stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmpack.backends.adapter_folder import ADAPTER
from vlmpack.backends.hf.adapted_experts import BASE_LAYER, by_expert
from vlmpack.backends.hf.frozen import BASE
from vlmpack.backends.policy import component_of, is_adapter
from vlmpack.families.base import ModulePaths
from vlmpack.proof.measure import (
    GRADIENT_BOUND,
    NOISE_CEILING,
    Check,
    GradientError,
    bounded,
    error_together,
    gradient_errors,
)
from vlmpack.proof.verify.compare import Compared
from vlmpack.recipe.trainable import LoraSection

UNDETERMINED = 1e-3
"""A gradient that differs by this much between two unpacked runs is rounding alone (that of the
bias of keys, which softmax does not see): it counts in its part and is not looked at alone."""

NEGLIGIBLE = 1e-6
"""So is one this small compared with its part's: float32 keeps seven digits of its terms."""


PARTS = (
    "tower",
    "projector",
    "language model",
    "recurrent layers",
    "recurrent scalars",
    "adapters",
)
"""The parts of a model, in the order of the table."""

SCALARS = ("A_log", "dt_bias")
"""Names of a recurrent layer's own parameters that hold one number a head and decide what is left
of its state: every token of a sample adds to their gradients, and much of it cancels."""


def with_missing(
    errors: Mapping[str, GradientError], stock: Mapping[str, Tensor], expected: Iterable[str]
) -> dict[str, GradientError]:
    """The errors, with the whole gradient as the error of trained parameters that got none."""
    whole = dict(errors)
    for name in expected:
        if name not in whole:
            scale = float(stock[name].double().square().sum())
            whole[name] = GradientError(scale, scale)
    return whole


def part_of(name: str, paths: ModulePaths, recurrent: Sequence[str]) -> str:
    """The part of the model that a parameter is reported under.

    Args:
        recurrent: paths of modules that carry a state along the row.
    """
    path, _, own = name.rpartition(".")
    if path in recurrent and own in SCALARS:
        return "recurrent scalars"
    if any(name.startswith(path + ".") for path in recurrent):
        return "recurrent layers"
    component = component_of(name, paths)
    return {"vision": "tower", "language": "language model"}.get(component, component)


def check_gradients(
    compared: Compared,
    errors: Mapping[str, GradientError],
    own: Mapping[str, GradientError],
    parts: Mapping[str, str],
    own_rule: Mapping[str, GradientError],
) -> list[Check]:
    """The gradients of each part of the model.

    Args:
        own: errors of the unpacked run against itself.
        own_rule: errors of the unpacked run's own recurrences, of parameters whose stock model
            has them in float64.
    """
    names: dict[str, list[str]] = {}
    for name in errors:
        names.setdefault(parts[name], []).append(name)
    checks = []
    for part in (part for part in PARTS if part in names):
        check = _check_part(compared, part, names[part], errors, own)
        checks.append(_against_own_rule(check, [own_rule[n] for n in names[part] if n in own_rule]))
    return checks


def _against_own_rule(check: Check, own_rule: Sequence[GradientError]) -> Check:
    """A part whose stock model has its recurrences in float64: the two have to be the same rule."""
    if not own_rule:
        return check
    off = error_together(own_rule)
    detail = f"{check.detail}; against float64, where stock's own is off by {off:.1e}"
    if check.fails or off <= NOISE_CEILING * GRADIENT_BOUND:
        return replace(check, detail=detail)
    look_at = "the recurrences: transformers' rule and vlmpack's in float64 are not the same"
    return replace(check, status="fail", detail=detail, look_at=look_at)


def _check_part(
    compared: Compared,
    part: str,
    names: Sequence[str],
    errors: Mapping[str, GradientError],
    own: Mapping[str, GradientError],
) -> Check:
    if not any(errors[name].error or errors[name].scale for name in names):
        return Check(
            name=f"gradients: {part}",
            status="too few",
            detail=f"{len(names)} parameters, all zero alone and in the row: no label depends on "
            f"them",
        )
    noise = error_together([own[name] for name in names])
    bound = compared.bound(GRADIENT_BOUND, noise)
    least = NEGLIGIBLE**2 * sum(errors[name].scale for name in names)
    large = [n for n in names if errors[n].scale > least]
    # Where the unpacked run is another one in a padded batch, all of its gradients differ.
    alone = [n for n in large if own[n].relative < UNDETERMINED] or large or list(names)
    beyond = [
        name
        for name in alone
        if (limit := compared.bound(GRADIENT_BOUND, own[name].relative)) is not None
        and not errors[name].relative <= limit
    ]
    name = max(beyond or alone, key=lambda name: errors[name].relative)
    detail = f"{len(names)} parameters, worst {name} {errors[name].relative:.1e}"
    if beyond:
        detail += f", {len(beyond)} beyond their bound"
    check = bounded(
        f"gradients: {part}",
        error_together([errors[name] for name in names]),
        bound,
        noise=noise,
        detail=detail,
    )
    if not beyond and not check.fails:
        return check
    look_at = "the rows above; if they pass, the backward pass of this part"
    return replace(check, status="fail", look_at=look_at)


WEIGHT_A = f".lora_A.{ADAPTER}.weight"
WEIGHT_B = f".lora_B.{ADAPTER}.weight"
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """What the engine knew of its adapters before the optimizer step, on CPU. Empty without
    adapters.

    Args:
        weights: of adapters, and under DoRA those of the adapted layers.
        experts: the tensor that each wrapper of experts adapts, and whether it is (E, in, out).
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def weight_of(self, name: str) -> str:
        """transformers' name of the weight that an adapter's parameter lies beside."""
        layer = name.partition(".lora_")[0]
        return self.experts[layer][0] if layer in self.experts else f"{layer}.weight"

    @classmethod
    def of(cls, model: nn.Module | None, lora: LoraSection | None) -> AdapterRun:
        """Between `finish_gradients` and `step`. Collective.

        Args:
            model: transformers' with adapters inside; None where the engine has its own.
        """
        run = cls()
        if model is None or lora is None:
            return run
        named: dict[str, Any] = dict(model.named_modules())
        for name, wrapper in named.items():
            if hasattr(wrapper, "parameter_name"):
                tensor = f"{name.partition(f'.{BASE_LAYER}')[0]}.{wrapper.parameter_name}"
                run.experts[name] = tensor, wrapper.get_base_layer().is_transposed
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                gradient = parameter.grad
                zero = parameter.detach() * 0.0
                run.weights[name] = _whole(parameter)
                run.gradients[name] = _whole(zero if gradient is None else gradient)
            elif lora.dora and name.endswith(f"{BASE}weight"):
                run.weights[name] = _whole(parameter)
        return run


def _whole(value: Any) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    whole: Tensor = value.detach().float().cpu().clone()
    return whole


def expected_gradients(
    run: AdapterRun, stock: Mapping[str, Tensor], lora: LoraSection
) -> dict[str, Tensor]:
    """The gradients of adapters at their start, from the stock model's.

    Args:
        stock: gradients of whole weights, under transformers' names.
    """
    gradients, weights = {}, run.weights
    for name, value in weights.items():
        layer, mark, _ = name.partition(".lora_")
        if not mark:
            continue
        whole = stock[run.weight_of(name)].double()
        if name.endswith(WEIGHT_A):
            expected = 0.0 * value.double()
        elif name.endswith(WEIGHT_B) and layer in run.experts:
            whole = whole.mT if run.experts[layer][1] else whole
            down, _ = by_expert(weights[layer + WEIGHT_A].double(), value, len(whole))
            update = lora.scaling_of(run.weight_of(name)) * (whole @ down.mT)
            expected = update.permute(1, 2, 0).reshape(value.shape)
        elif name.endswith(WEIGHT_B):
            expected = lora.scaling_of(layer) * (whole @ weights[layer + WEIGHT_A].double().T)
        else:
            assert name.endswith(MAGNITUDE)
            base = weights[f"{layer}{BASE}weight"].double()
            expected = (whole * base).sum(1) / base.norm(dim=1)
        gradients[name] = expected.float()
    return gradients


def check_adapters(
    compared: Compared,
    run: AdapterRun,
    lora: LoraSection | None,
    own: Mapping[str, GradientError],
) -> list[Check]:
    """Check the row's gradients of adapters; no check without any.

    Args:
        own: errors of the unpacked run against itself, for the adapted weights.
    """
    if lora is None or not run.gradients:
        return []
    expected = expected_gradients(run, compared.stock.gradients, lora)
    errors = gradient_errors(expected, run.gradients.items())
    noise = {
        name: GradientError(own[run.weight_of(name)].relative ** 2 * error.scale, error.scale)
        for name, error in errors.items()
    }
    return check_gradients(compared, errors, noise, dict.fromkeys(errors, "adapters"), {})
