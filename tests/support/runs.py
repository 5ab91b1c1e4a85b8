"""What a run computed, per sample, and the differences between two of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.policy import is_untouched
from vlmpack.packing import PackedBatch, PaddedBatch, pack_batch_sequences
from vlmpack.packing.batch import IGNORE_INDEX, EncodedSample, PackedSeqParams

LOSS_TOLERANCE = 1e-6
"""Relative, per sample: about ten float32 roundings. The stated bound of the project."""
GRADIENT_TOLERANCE = 1e-5
"""Relative L2, per parameter: a gradient is a sum over hundreds of tokens in another order."""

NO_GRADIENT = re.compile(
    r"\b(vision_model|vision_tower)\..*\bk_proj\.bias$|\bqformer\..*\battention\.key\.bias$"
)
"""Biases of the keys of a tower or a projector without rotary positions: they add the same to all
scores of a query, which softmax takes away again. Their gradient is rounding alone, compared with
nothing."""
ROUNDING = 1e-6
"""Bound on the norm of such a gradient, where those of others are above 1e-4."""

GROUPS = {
    "projector": "model.visual.merger.",
    "tower": "model.visual.",
    "language model": "model.language_model.",
}
"""Name prefixes, most specific first."""


@dataclass(frozen=True)
class Run:
    """One forward and backward pass over some samples.

    Args:
        losses: per sample, the losses of its label tokens in order.
        gradients: per parameter, of the mean over all label tokens.
        positions: per sample, (A, s).
        lengths: per sample, s; the boundaries.
    """

    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    positions: dict[str, Tensor]
    lengths: dict[str, int]


def group_of(name: str) -> str:
    """tower, projector, language model, or head where it has a weight of its own."""
    return next((group for group, prefix in GROUPS.items() if name.startswith(prefix)), "head")


def mean_loss(losses: Tensor) -> float:
    """Mean in float64, so that the comparison adds no rounding of its own."""
    return float(losses.double().mean())


def loss_errors(run: Run, reference: Run) -> dict[str, float]:
    """Relative error of each sample's mean loss."""
    return {
        key: abs(mean_loss(run.losses[key]) - mean_loss(theirs)) / mean_loss(theirs)
        for key, theirs in reference.losses.items()
    }


def relative_l2(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs| in float64; 0 where both are zero."""
    scale = float(theirs.double().norm())
    error = float((ours.double() - theirs.double()).norm())
    return error / scale if scale else (0.0 if error == 0.0 else float("inf"))


def gradient_errors(run: Run, reference: Run) -> dict[str, float]:
    """Of each parameter, as `errors_by_name` has it."""
    return errors_by_name(run.gradients, reference.gradients)


def errors_by_name(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of each gradient; of `NO_GRADIENT` 0 where it has none."""
    return {
        name: (
            _rounding_error(ours[name], value)
            if NO_GRADIENT.search(name)
            else relative_l2(ours[name], value)
        )
        for name, value in theirs.items()
    }


def _rounding_error(ours: Tensor, theirs: Tensor) -> float:
    largest = max(float(ours.norm()), float(theirs.norm()))
    return 0.0 if largest < ROUNDING else float("inf")


def find_differences(packed_run: Run, reference: Run) -> list[str]:
    """Everything in which a run differs from the per-sample reference; [] where it is the same.

    Compared: which samples, their boundaries, positions (exactly), label counts, losses, and every
    parameter's gradient.
    """
    found: list[str] = []
    for name in ("losses", "gradients"):
        ours, theirs = getattr(packed_run, name).keys(), getattr(reference, name).keys()
        if ours != theirs:
            found.append(f"{name}: other keys: {sorted(ours ^ theirs)[:3]}")
    if found:
        return found
    if packed_run.lengths != reference.lengths:
        found.append(f"boundaries: {packed_run.lengths} != {reference.lengths}")
    for key, theirs in reference.positions.items():
        if not torch.equal(packed_run.positions[key], theirs):
            found.append(f"positions of {key}")
    for key, theirs in reference.losses.items():
        if packed_run.losses[key].shape != theirs.shape:
            found.append(f"label tokens of {key}: {len(packed_run.losses[key])} != {len(theirs)}")
    for key, error in loss_errors(packed_run, reference).items():
        if not error <= LOSS_TOLERANCE:
            found.append(f"loss of {key}: relative error {error:.1e}")
    for name, error in gradient_errors(packed_run, reference).items():
        if not error <= GRADIENT_TOLERANCE:
            found.append(f"gradient of {name} ({group_of(name)}): relative error {error:.1e}")
    return found


def starts_of(batch: PackedBatch) -> list[int]:
    """Physical start of each sample in the row."""
    return [0, *accumulate(batch.segment_lengths)][: len(batch.lengths)]


def split_by_sample(batch: PackedBatch | PaddedBatch, losses: Tensor) -> dict[str, Tensor]:
    """The losses of each sample's slots, in order."""
    if isinstance(batch, PackedBatch):
        starts = starts_of(batch)
        stops = [s + n for s, n in zip(starts, batch.segment_lengths, strict=False)]
    else:
        width = batch.input_ids.shape[1]
        starts = [row * width for row in range(len(batch.keys))]
        stops = [start + width for start in starts]
    at = batch.label_positions.to(losses.device)
    return {
        key: losses[(at >= start) & (at < stop)]
        for key, start, stop in zip(batch.keys, starts, stops, strict=True)
    }


def positions_by_sample(batch: PackedBatch | PaddedBatch) -> dict[str, Tensor]:
    """Each sample's (A, s) positions as the model is given them."""
    if isinstance(batch, PackedBatch):
        return {
            key: batch.position_ids[:, 0, start : start + length]
            for key, start, length in zip(batch.keys, starts_of(batch), batch.lengths, strict=True)
        }
    return {
        key: batch.position_ids[:, row, : batch.lengths[row]] for row, key in enumerate(batch.keys)
    }


def _gradient_of(parameter: Any, *, reached: bool) -> Tensor:
    """A copy. Where there is none: zeros if no sample is said to reach the parameter, else what
    equals nothing."""
    if parameter.grad is None:
        return torch.full_like(parameter, float("nan") if reached else 0.0)
    return parameter.grad.detach().clone()


def run_batch(
    vlm: Any, batch: PackedBatch | PaddedBatch, params: PackedSeqParams | None = None
) -> Run:
    """Our model on one batch; gradients of the mean over all its label tokens.

    Args:
        vlm: a PackedVLM.
        batch: on CPU.
        params: other boundaries than the batch's own, for the controls.
    """
    vlm.zero_grad(set_to_none=True)
    losses = vlm(batch, params if params is not None else batch.packed_seq_params())
    (losses.sum() / batch.num_label_tokens).backward()
    return Run(
        losses={key: value.detach() for key, value in split_by_sample(batch, losses).items()},
        gradients={
            name: _gradient_of(p, reached=not is_untouched(name, vlm.paths))
            for name, p in vlm.model.named_parameters()
        },
        positions=positions_by_sample(batch),
        lengths=dict(zip(batch.keys, batch.lengths, strict=True)),
    )


def pack(
    samples: list[EncodedSample], *, alignment: int = 1, total: int = 1, pad: int = 561
) -> PackedBatch:
    """One row of the tiny model's samples."""
    return pack_batch_sequences(
        samples, pad_to_multiple_of=alignment, pad_token_id=pad, total_multiple_of=total
    )


def relabelled(batch: PackedBatch, labels: Tensor) -> PackedBatch:
    """The batch with other labels, its invariants kept."""
    loss_mask = labels != IGNORE_INDEX
    return replace(
        batch,
        labels=labels,
        loss_mask=loss_mask,
        label_positions=loss_mask.flatten().nonzero().squeeze(1),
    )
