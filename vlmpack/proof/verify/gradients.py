"""Gradients against the unpacked reference's, by part: tower, projector, language model, recurrent
layers, adapters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from vlmpack.backends.policy import component_of
from vlmpack.families.base import ModulePaths
from vlmpack.proof.check import Check
from vlmpack.proof.verify.compare import Compared
from vlmpack.proof.verify.figures import GRADIENT_BOUND, bounded, quotient

UNDETERMINED = 1e-3
"""A gradient that differs by this much between two unpacked runs is rounding alone (that of the
bias of keys, which softmax does not see): it counts in its part and is not looked at alone."""

NEGLIGIBLE = 1e-6
"""So is one this small beside its part's: float32 keeps seven digits of what it was summed from."""


@dataclass(frozen=True, slots=True)
class GradientError:
    """Squared norms of one parameter's gradient: of the error, and of the reference."""

    error: float
    scale: float

    @property
    def relative(self) -> float:
        """The relative L2 error."""
        return quotient(math.sqrt(self.error), math.sqrt(self.scale))


def gradient_errors(
    reference: Mapping[str, Tensor], ours: Iterable[tuple[str, Tensor]]
) -> dict[str, GradientError]:
    """The error of each parameter that both have; nothing else is kept of `ours`."""
    found = {}
    for name, gradient in ours:
        theirs = reference.get(name)
        if theirs is not None:
            double = theirs.double()
            error = float((gradient.double() - double).square().sum())
            found[name] = GradientError(error, float(double.square().sum()))
    return found


def with_missing(
    errors: Mapping[str, GradientError], reference: Mapping[str, Tensor], expected: Iterable[str]
) -> dict[str, GradientError]:
    """The errors, and those of parameters that should be trained and got no gradient: all of it.

    Args:
        expected: names of the stock model's parameters that the recipe trains.
    """
    found = dict(errors)
    for name in expected:
        if name not in found:
            scale = float(reference[name].double().square().sum())
            found[name] = GradientError(scale, scale)
    return found


def part_of(name: str, paths: ModulePaths, recurrent: Sequence[str]) -> str:
    """The part of the model that a parameter is reported under.

    Args:
        recurrent: paths of modules that carry a state along the row.
    """
    if any(name.startswith(path + ".") for path in recurrent):
        return "recurrent layers"
    component = component_of(name, paths)
    return {"vision": "tower", "language": "language model"}.get(component, component)


def check_gradients(
    compared: Compared,
    found: Mapping[str, GradientError],
    own: Mapping[str, GradientError],
    parts: Mapping[str, str],
) -> list[Check]:
    """The gradients of each part of the model.

    Args:
        found: errors of the packed run.
        own: errors of the unpacked run against itself.
        parts: of each parameter.
    """
    names: dict[str, list[str]] = {}
    for name in found:
        names.setdefault(parts[name], []).append(name)
    order = ("tower", "projector", "language model", "recurrent layers", "adapters")
    return [_check_part(compared, part, names[part], found, own) for part in order if part in names]


def _check_part(
    compared: Compared,
    part: str,
    names: Sequence[str],
    found: Mapping[str, GradientError],
    own: Mapping[str, GradientError],
) -> Check:
    def together(errors: Mapping[str, GradientError]) -> float:
        total = sum(errors[name].error for name in names)
        scale = sum(errors[name].scale for name in names)
        return quotient(math.sqrt(total), math.sqrt(scale))

    if not any(found[name].error or found[name].scale for name in names):
        return Check(
            name=f"gradients: {part}",
            status="too few",
            detail=f"{len(names)} parameters, all zero alone and in the row: no label depends on "
            f"them",
        )
    noise = together(own)
    bound = compared.bound(GRADIENT_BOUND, noise)
    least = NEGLIGIBLE**2 * sum(found[name].scale for name in names)
    alone = [n for n in names if own[n].relative < UNDETERMINED and found[n].scale > least]
    alone = alone or list(names)
    beyond = [
        name
        for name in alone
        if (limit := compared.bound(GRADIENT_BOUND, own[name].relative)) is not None
        and not found[name].relative <= limit
    ]
    name = max(beyond or alone, key=lambda name: found[name].relative)
    detail = f"{len(names)} parameters, worst {name} {found[name].relative:.1e}"
    if beyond:
        detail += f", {len(beyond)} beyond their bound"
    check = bounded(f"gradients: {part}", together(found), bound, noise=noise, detail=detail)
    if not beyond and not check.fails:
        return check
    look_at = "the rows above; if they pass, the backward pass of this part"
    return replace(check, status="fail", look_at=look_at)
