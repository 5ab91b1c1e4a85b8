"""The few measures that all checks of numbers share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from vlmpack.proof.check import Check, Status

LOSS_BOUND = 1e-6
"""float32, relative, of a sample's mean loss: about ten roundings."""

GRADIENT_BOUND = 1e-5
"""float32, relative L2: a gradient is a sum over many tokens, taken in another order."""

OUTPUT_BOUND = 1e-5
"""float32, relative L2 of hidden states, image features and logits."""

NOISE_FACTOR = 2.0
"""A bound is never below this many times what the unpacked run differs from itself by."""

NOISE_CEILING = 100.0
"""However noisy the unpacked run is, a bound is never above this many times the stated one."""


def bounded(
    name: str,
    measured: float,
    bound: float | None,
    *,
    noise: float | None = None,
    detail: str = "",
    look_at: str = "",
) -> Check:
    """A check of a number; nan and infinity fail. Without a bound it is shown."""
    status: Status = "shown"
    if bound is not None:
        status = "pass" if measured <= bound else "fail"
    if not math.isfinite(measured):
        status = "fail"
    return Check(
        name=name,
        status=status,
        measured=measured,
        bound=bound,
        noise=noise,
        detail=detail,
        look_at=look_at,
    )


def with_noise(stated: float, noise: float) -> float:
    """The bound to hold a packed run to.

    Args:
        stated: what the numbers should stay below.
        noise: the same measure of the unpacked run against itself.
    """
    if not math.isfinite(noise):
        return stated
    return min(max(stated, NOISE_FACTOR * noise), NOISE_CEILING * stated)


def relative_l2(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs| in float64; 0 where both are zero, inf where shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    reference = theirs.double()
    return quotient(float((ours.double() - reference).norm()), float(reference.norm()))


def quotient(error: float, scale: float) -> float:
    """error / scale; 0 for nothing over nothing."""
    if error == 0.0:
        return 0.0
    return error / scale if scale else math.inf


def worst(values: Iterable[float]) -> float:
    """The largest, nan above all; 0 for none."""
    found = list(values)
    if any(math.isnan(value) for value in found):
        return math.nan
    return max(found, default=0.0)


def names_of(keys: Sequence[str], limit: int = 4) -> str:
    """The first few, and how many more."""
    rest = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(keys[:limit]) + rest
