"""Packed numbers against the stock model's: losses, logits, outputs of each part.

In float32 every figure has a bound. The bound rises if the unpacked model differs from itself by
more (`with_noise`). In bfloat16 only one figure has a bound: the L2 error of the label tokens'
log-probabilities against float32, relative to that of the unpacked bfloat16 run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmpack.packing import EncodedSample
from vlmpack.proof.measure import (
    BFLOAT16_RATIO,
    FEWEST_LABELS,
    LOSS_BOUND,
    OUTPUT_BOUND,
    Check,
    bounded,
    loss_error,
    quotient,
    relative_l2,
    with_noise,
    worst,
)
from vlmpack.proof.verify.packed import Packed, SlotLosses
from vlmpack.proof.verify.samples import VerifiedRow
from vlmpack.proof.verify.unpacked import Point, Unpacked

SAMPLE_LOSSES = "loss of each sample"

RESETS = "recurrent layers: their state must be reset at every boundary, and nowhere else"

ISOLATION = "attention isolation: boundaries must reach every attention layer"


@dataclass(frozen=True, slots=True)
class Compared:
    """The inputs of every comparison.

    Args:
        stock: unpacked, float32.
        noise: unpacked again, another way; in bfloat16 where that is what is verified.
        exact: whether bounds of float32 apply.
    """

    samples: Sequence[EncodedSample]
    rows: Sequence[VerifiedRow]
    stock: Unpacked
    noise: Unpacked
    exact: bool

    def bound(self, stated: float, noise: float) -> float | None:
        """The bound that applies; None in bfloat16."""
        return with_noise(stated, noise) if self.exact else None


def losses_by_sample(rows: Sequence[VerifiedRow], losses: SlotLosses) -> dict[int, Tensor]:
    """(l,) losses of each sample's own slots and the gap after them, in order."""
    by_sample: dict[int, Tensor] = {}
    for place, row in enumerate(rows):
        values = losses.get(place, {})
        slots = sorted(values)
        for number, start, end in zip(row.numbers, row.starts, row.ends, strict=True):
            by_sample[number] = torch.tensor([values[s] for s in slots if start <= s < end])
    return by_sample


def check_losses(compared: Compared, losses: SlotLosses) -> Check:
    ours = losses_by_sample(compared.rows, losses)
    errors = [
        loss_error(ours[number], theirs) for number, theirs in enumerate(compared.stock.losses)
    ]
    again = compared.noise.losses
    tokens = torch.cat(again).double() - torch.cat(compared.stock.losses).double()
    noise = worst(
        [
            *map(loss_error, again, compared.stock.losses),
            # A sample of few label tokens may have been lucky.
            float(tokens.square().mean().sqrt()),
        ]
    )
    at = where_worst(errors)
    detail = f"{len(errors)} samples, worst {compared.samples[at].key}"
    if math.isinf(errors[at]):
        num_losses = len(compared.stock.losses[at])
        detail = f"{compared.samples[at].key}: {len(ours[at])} label tokens, alone {num_losses}"
    return bounded(
        SAMPLE_LOSSES,
        worst(errors),
        compared.bound(LOSS_BOUND, noise),
        noise=noise,
        detail=detail,
        look_at="the rows above; if they pass, the cross entropy",
    )


def check_log_probabilities(compared: Compared, losses: SlotLosses) -> Check:
    """bfloat16: the packed run's errors against those of the unpacked run."""
    name = "log-probabilities of label tokens"
    ours = losses_by_sample(compared.rows, losses)
    theirs = torch.cat(compared.stock.losses).double()
    values = torch.cat([ours[number] for number in range(len(ours))]).double()
    if values.shape != theirs.shape:
        return Check(
            name=name, status="fail", detail=f"{len(values)} label tokens, alone {len(theirs)}"
        )
    error = float((values - theirs).norm())
    noise = float((torch.cat(compared.noise.losses).double() - theirs).norm())
    check = bounded(
        name,
        quotient(error, noise),
        BFLOAT16_RATIO,
        noise=1.0,
        detail=f"L2 of {len(theirs):,} errors against float32: packed {error:.3g}, unpacked "
        f"{noise:.3g}",
        look_at="rerun without --dtype: float32 says where",
    )
    if len(theirs) >= FEWEST_LABELS:
        return check
    detail = f"data.train has {len(theirs):,} label tokens, the bound needs {FEWEST_LABELS:,}; "
    return replace(check, status="too few", detail=detail + check.detail, look_at="")


def check_logits(compared: Compared, logits: Mapping[int, Tensor]) -> Check:
    """The logits of every sample.

    Args:
        logits: (n, V) of the kept slots, by sample.
    """
    pairs = list(enumerate(compared.stock.logits))
    errors = [relative_l2(logits[number], theirs) for number, theirs in pairs]
    noise = worst(
        relative_l2(again, theirs)
        for again, theirs in zip(compared.noise.logits, compared.stock.logits, strict=True)
    )
    num_logits = sum(len(theirs) for _, theirs in pairs)
    return bounded(
        "logits of each sample",
        worst(errors),
        compared.bound(OUTPUT_BOUND, noise),
        noise=noise,
        detail=f"{num_logits:,} tokens, worst {compared.samples[where_worst(errors)].key}",
        look_at=ISOLATION,
    )


def split_outputs(
    compared: Compared, packed: Packed, point: Point, kept: Sequence[Tensor]
) -> dict[int, Tensor]:
    """A point's output of each sample, out of the rows."""
    by_sample: dict[int, Tensor] = {}
    for row, outputs in zip(compared.rows, packed.outputs, strict=True):
        theirs = {n: compared.stock.outputs[n].get(point.path) for n in row.numbers}
        each = 1 if point.kind == "language model" else row.sequences  # a pair's images are once
        numbers = [n for n in row.numbers[::each] if theirs[n] is not None]
        if not numbers:  # a row without images: the tower saw the blank one
            continue
        if point.kind == "language model":
            counts = [len(kept[n]) for n in numbers]
        else:
            counts = [len(value) for n in numbers if (value := theirs[n]) is not None]
        value = outputs.get(point.path)
        if value is None:  # a family may call the parts of a tower without the tower
            continue
        if len(value) != sum(counts):
            by_sample.update({n: torch.empty(0) for n in numbers})
            continue
        for number, part in zip(numbers, value.split(counts), strict=True):
            by_sample.update(dict.fromkeys(range(number, number + each), part))
    return by_sample


def check_outputs(
    compared: Compared, packed: Packed, points: Sequence[Point], kept: Sequence[Tensor]
) -> list[Check]:
    """Check the outputs of each part of the model, in the order of the forward pass."""
    names = {
        "tower": "tower: features",
        "projector": "projector: features",
        "language model": "language model: each layer's output",
    }
    found = (
        _check_points(name, compared, packed, [p for p in points if p.kind == kind], kept)
        for kind, name in names.items()
    )
    return [check for check in found if check is not None]


def _check_points(
    name: str,
    compared: Compared,
    packed: Packed,
    points: Sequence[Point],
    kept: Sequence[Tensor],
) -> Check | None:
    """The points of one part: the largest error, and the first point beyond its bound."""
    largest = noise = 0.0
    bound: float | None = compared.bound(OUTPUT_BOUND, 0.0)
    first = ""
    first_bound = bound
    seen = 0
    for point in points:
        ours = split_outputs(compared, packed, point, kept)
        if not ours:
            continue
        seen += 1
        theirs = {n: compared.stock.outputs[n][point.path] for n in ours}
        errors = {n: relative_l2(value, theirs[n]) for n, value in ours.items()}
        own = worst(relative_l2(compared.noise.outputs[n][point.path], theirs[n]) for n in theirs)
        limit = compared.bound(OUTPUT_BOUND, own)
        largest, noise = worst([largest, *errors.values()]), worst([noise, own])
        if limit is not None:
            bound = max(bound or 0.0, limit)
            if not first and not worst(errors.values()) <= limit:
                keys = [compared.samples[n].key for n, e in errors.items() if not e <= limit]
                first = f"first differs: {point}, in {len(keys)} samples, e.g. {keys[0]}"
                first_bound = limit
    if not seen:
        return None
    detail = f"{seen} modules" if seen > 1 else points[0].path
    check = bounded(name, largest, bound, noise=noise, detail=first or detail)
    if not first:
        return check
    look_at = "the order of images in the row" if points[0].kind != "language model" else ISOLATION
    if "(recurrent)" in first:
        look_at = RESETS
    return replace(check, status="fail", bound=first_bound, look_at=look_at)


def where_worst(errors: Sequence[float]) -> int:
    """The index of the largest, nan above all."""
    return max(range(len(errors)), key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
