"""Measures that `verify`, `judge` and the sweep share.

It has every bound with its reason, the errors that the bounds limit, the one change of a sample's
contents, and the one search for leaks. It knows no recipe, engine or collator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, backends

Status = Literal["pass", "fail", "shown", "too few", "not shown"]
"""`shown` is a figure without a bound. `too few` means that the bound says nothing about so little
data. `not shown` means that nothing could be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of what was checked.

    Args:
        measured: the largest difference that was found; None where it is no number.
        bound: the largest that passes; None for an exact comparison, or none.
        noise: the same measure between two unpacked runs; None where there is none.
        detail: where the largest difference lies, what was found first, or what was compared.
        look_at: what to look at where the check fails.
    """

    name: str
    status: Status
    measured: float | None = None
    bound: float | None = None
    noise: float | None = None
    detail: str = ""
    look_at: str = ""

    @property
    def fails(self) -> bool:
        return self.status == "fail"

    @property
    def sentence(self) -> str:
        """The result and, on failure, what to look at."""
        hint = f"; look at {self.look_at}" if self.fails and self.look_at else ""
        return self.detail + hint


LOSS_BOUND = 1e-6
"""float32, relative, of a sample's mean loss: about ten roundings."""

GRADIENT_BOUND = 1e-5
"""float32, relative L2: a gradient is a sum over many tokens, taken in another order."""

OUTPUT_BOUND = 1e-5
"""float32, relative L2 of hidden states, image features and logits."""

MEAN_BOUND = 1e-5
"""float32, relative, of a mean of losses that are each right to LOSS_BOUND."""

EXPORT_BOUND = 1e-6
"""float32, relative L2 of logits: an export that is loaded again has the very same weights."""

SHARED_MATMUL_BOUND = 1e-5
"""float32, relative L2 where samples share the experts' matmuls: another number of tokens at an
expert is blocked in another way, which changes the last bit."""

BFLOAT16_RATIO = 1.1
"""bfloat16: the packed run's error against float32 over the unpacked run's."""

FEWEST_LABELS = 1000
"""Label tokens below which that ratio is mostly chance; so many are taken, if the data has them."""

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
    """A check of a number; nan and infinity fail. Without a bound it is only shown."""
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
    """The bound to hold a packed run to."""
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
    errors = list(values)
    if any(math.isnan(value) for value in errors):
        return math.nan
    return max(errors, default=0.0)


def loss_error(ours: Tensor, stock: Tensor) -> float:
    """Relative error of a sample's mean loss; inf for another number of label tokens.

    A loss below one nat counts as one nat. If the model is sure of a token, its loss is the
    difference of two large logits, and keeps their rounding.
    """
    if ours.shape != stock.shape:
        return math.inf
    if not len(stock):
        return 0.0
    mean = float(stock.double().mean())
    return abs(float(ours.double().mean()) - mean) / max(1.0, mean)


@dataclass(frozen=True, slots=True)
class GradientError:
    error: float
    scale: float

    @property
    def relative(self) -> float:
        return quotient(math.sqrt(self.error), math.sqrt(self.scale))


def gradient_errors(
    stock: Mapping[str, Tensor], ours: Iterable[tuple[str, Tensor]]
) -> dict[str, GradientError]:
    """The error of each parameter that both have. No gradient of `ours` is kept."""
    errors = {}
    for name, gradient in ours:
        theirs = stock.get(name)
        if theirs is not None:
            double = theirs.double()
            error = float((gradient.double() - double).square().sum())
            errors[name] = GradientError(error, float(double.square().sum()))
    return errors


def error_together(errors: Iterable[GradientError]) -> float:
    each = list(errors)
    whole = GradientError(sum(one.error for one in each), sum(one.scale for one in each))
    return whole.relative


def ordinary_ids(ids: Iterable[Tensor], special: Iterable[int]) -> Tensor:
    """(n,) int64 ids of ordinary tokens that occur, ascending; `special` ids are left out."""
    unique: Tensor = torch.cat([each.flatten().long() for each in ids]).unique()
    return unique[~torch.isin(unique, torch.tensor(sorted(special), dtype=torch.int64))]


def other_tokens(ids: Tensor, ordinary: Tensor) -> Tensor:
    """The ids of a changed sample: each ordinary token becomes the next ordinary one."""
    changed, at = ids.clone(), torch.isin(ids, ordinary)
    places = torch.searchsorted(ordinary, ids[at].long())
    changed[at] = ordinary[(places + 1) % max(1, len(ordinary))].to(ids.dtype)
    return changed


def other_pixels(pixels: Tensor) -> Tensor:
    return 0.5 - pixels.flip(0)


@dataclass(frozen=True, slots=True)
class Trial:
    """A row that was computed again with other contents of one sample.

    Args:
        own: places of the sequences that may move. They must move if the change can be seen.
        moved: how far each sequence of the row moved.
        unseen: places of `own` where nothing could be seen.
    """

    name: str
    own: Sequence[int]
    moved: Sequence[float]
    unseen: Sequence[int] = ()


@dataclass(slots=True)
class Leaks:
    """The result of some trials.

    Args:
        pairs: each changed sample with the name of another that moved beyond the bound.
        unmoved: changes that changed nothing of their own.
        largest: how far another sample moved at most.
    """

    trials: int = 0
    pairs: list[tuple[str, str]] = field(default_factory=list)
    unmoved: list[str] = field(default_factory=list)
    largest: float = 0.0

    def add(self, trial: Trial, names: Sequence[str], bound: float) -> None:
        self.trials += 1
        if any(not trial.moved[own] > 0.0 and own not in trial.unseen for own in trial.own):
            self.unmoved.append(trial.name)
        for place, error in enumerate(trial.moved):
            if place not in trial.own:
                self.largest = worst([self.largest, error])
                if not error <= bound:
                    self.pairs.append((trial.name, names[place]))


@contextmanager
def full_float32() -> Iterator[None]:
    """float32 matmuls and convolutions without TF32 or bfloat16 in a block.

    torch lets cuDNN's convolutions use TF32 by default. A vision tower's patches then depend on the
    number of other images, by more than packing may change. For this torch has an old and a new
    setting. The old one cannot always read what the new one set.
    """
    gpu: Any = backends.cudnn  # whose operations torch's own types do not know
    cpu: Any = backends.mkldnn
    operations: tuple[Any, ...] = (backends.cuda.matmul, gpu.conv, gpu.rnn)
    operations += (cpu.matmul, cpu.conv, cpu.rnn)
    precisions = [operation.fp32_precision for operation in operations]
    try:
        older = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:
        older = None
    else:  # or who asks by the older way inside is refused
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
    for operation in operations:
        operation.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            backends.cudnn.allow_tf32 = older[1]
        for operation, precision in zip(operations, precisions, strict=True):
            operation.fp32_precision = precision
