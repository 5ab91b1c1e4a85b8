"""What comes out of a batch: losses, gradients, and how losses are averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmpack.errors import VlmpackError
from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge.alone import CPU, Place, Sample, copied, device_of, on
from vlmpack.proof.judge.findings import Finding, failed
from vlmpack.proof.measure import (
    GRADIENT_BOUND,
    LOSS_BOUND,
    MEAN_BOUND,
    Check,
    bounded,
    error_together,
    gradient_errors,
    loss_error,
    worst,
)
from vlmpack.proof.stock import take_gradients, token_losses
from vlmpack.words import counted, raised, what_is

Collate = Callable[[list[Any]], Mapping[str, Any]]
"""Samples -> a batch, with `input_ids` (B, S) and `labels` (B, S)."""

Losses = Callable[[Any, Mapping[str, Any]], Tensor]
"""(model, batch) -> (L,) losses of the batch's label tokens, row by row, with their graph."""

Step = Callable[[Any, Sequence[Mapping[str, Any]]], Tensor]
"""(model, micro-batches) -> the 0-d loss that one optimizer step differentiates."""

EXACT = (torch.float32, torch.float64)
"""Types whose bounds are known. Losses and gradients of others are shown: their rounding is that of
the model's depth and of the kernels."""


class NoBatchError(VlmpackError):
    """What a collator returned is no batch."""


class Run:
    """Makes batches, on the CPU, and computes them, where the model is."""

    def __init__(
        self, model: Any, collate: Collate, losses: Losses | None, *, shifted: bool
    ) -> None:
        self.model, self.collate, self.losses = model, collate, losses
        self.shifted, self.device = shifted, device_of(model)
        self.exact = all(one.dtype in EXACT for one in model.parameters())

    def make(self, samples: Sequence[Any]) -> Mapping[str, Any]:
        """What the collator makes of samples, to be looked at.

        Raises:
            NoBatchError: it is no mapping with ids and labels.
        """
        made = self.collate(list(samples))
        is_mapping = hasattr(made, "keys") and hasattr(made, "__getitem__")
        lacks = [name for name in ("input_ids", "labels") if is_mapping and name not in made]
        if lacks or not is_mapping:
            what = f"a mapping without {', '.join(lacks)}" if lacks else what_is(made)
            raise NoBatchError(
                f"the collator returned {what}; expected a mapping with input_ids (B, S), "
                "labels (B, S) and what else the model takes"
            )
        found: Mapping[str, Any] = on(dict(made), CPU)
        return found

    def moved(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A copy of the batch where the model takes it."""
        found: Mapping[str, Any] = copied(on(batch, self.device))
        return found

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """(L,) losses of the label tokens, with their graph."""
        batch = self.moved(batch)
        if self.losses is not None:
            found = self.losses(self.model, batch)
            if not isinstance(found, Tensor) or found.dim() != 1:
                raise TypeError(f"losses= returned {what_is(found)}; expected a tensor (L,)")
            return found
        given = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.model(**given, use_cache=False).logits
        return token_losses(logits, batch["labels"], shifted=self.shifted)


def how_many(batch: Mapping[str, Any], values: Tensor, *, shifted: bool) -> str:
    """What is wrong with the number of a batch's losses; empty where there is one for each label
    token."""
    labels = batch["labels"] if shifted else batch["labels"][:, 1:]
    count = int((labels != IGNORE_INDEX).sum())
    return "" if len(values) == count else f"{len(values)} losses, and {count} label tokens"


def by_sample(
    batch: Mapping[str, Any], values: Tensor, where: Sequence[Place], *, shifted: bool
) -> list[Tensor]:
    """(l,) of the values of each sample's label tokens, on the CPU and without a graph; nothing
    where there is another number of values than of label tokens."""
    values = values.detach().cpu()
    labels = batch["labels"] if shifted else batch["labels"][:, 1:]
    rows, slots = (labels != IGNORE_INDEX).nonzero().unbind(1)
    found = []
    for at in where:
        mine = (rows == at.row) & (slots >= at.start) & (slots < at.stop - (not shifted))
        found.append(values[mine] if len(values) == len(rows) else values[:0])
    return found


def check_losses(
    run: Run,
    batch: Mapping[str, Any],
    computed: Tensor,
    samples: Sequence[Sample],
    where: Sequence[Place],
) -> Finding:
    """The mean loss of each sample, with its own alone."""
    name, look_at = "loss of each sample", "the rows above"
    if number := how_many(batch, computed, shifted=run.shifted):
        return failed(name, "other loss", number, "losses=")
    ours = by_sample(batch, computed, where, shifted=run.shifted)
    counts = [(len(one), len(sample.losses)) for one, sample in zip(ours, samples, strict=True)]
    uneven = [number for number, (has, alone) in enumerate(counts) if has != alone]
    if uneven:
        has, alone = counts[uneven[0]]
        detail = (
            f"sample {uneven[0]} has {counted(has, 'label token')} in the batch and {alone} alone; "
            f"it is the first of {len(uneven)}"
        )
        return failed(name, "other loss", detail, look_at)
    errors = [loss_error(one, sample.losses) for one, sample in zip(ours, samples, strict=True)]
    beyond = [
        number
        for number, error in enumerate(errors)
        if not (error <= LOSS_BOUND if run.exact else math.isfinite(error))
    ]
    where_first = f"sample {beyond[0]} is the first of {len(beyond)}" if beyond else ""
    check = bounded(
        name,
        worst(errors),
        LOSS_BOUND if run.exact else None,
        detail=where_first or ("as alone" if run.exact else "with the model's own rounding"),
        look_at=look_at,
    )
    return Finding(check, "other loss" if check.fails else "")


def check_gradients(run: Run, computed: Tensor, reference: Mapping[str, Tensor]) -> list[Finding]:
    """Gradients of the mean loss over all label tokens, by part of the model."""
    run.model.zero_grad(set_to_none=True)
    if not len(computed) or not computed.requires_grad:
        detail = (
            "the losses have no graph" if len(computed) else "there is no loss of a label token"
        )
        check = Check(name="gradients", status="not shown", detail=detail)
        return [Finding(check)]
    computed.mean().backward()
    errors = gradient_errors(reference, take_gradients(run.model).items())
    parts: dict[str, list[str]] = {}
    for name in reference:
        parts.setdefault(_part_of(name), []).append(name)
    found = []
    for part, names in parts.items():
        if not any(errors[name].error or errors[name].scale for name in names):
            continue
        check = bounded(
            f"gradients: {part}",
            error_together(errors[name] for name in names),
            GRADIENT_BOUND if run.exact else None,
            detail=f"{len(names)} parameters",
            look_at="the rows above",
        )
        found.append(Finding(check, "other gradients" if check.fails else ""))
    if not found:
        detail = "none of the parameters that are compared has one"
        found.append(Finding(Check(name="gradients", status="not shown", detail=detail)))
    return found


def _part_of(name: str) -> str:
    for part, marks in _PARTS.items():
        if any(mark in name for mark in marks):
            return part
    return "language model"


_PARTS = {
    "projector": ("merger", "projector", "connector", "embed_vision"),
    "tower": ("visual", "vision", "image_encoder"),
    "embeddings": ("embed_tokens", "lm_head", "wte"),
}
"""Part of a model -> what the names of its parameters have; of two the first one counts."""


def check_mean(
    run: Run,
    step: Step | None,
    samples: Sequence[Any],
    batch: Mapping[str, Any],
    reference: Sequence[Sample],
) -> Finding:
    """How losses are averaged: over label tokens, or over means of them."""
    sums = [float(sample.losses.double().sum()) for sample in reference]
    counts = [len(sample.losses) for sample in reference]
    groups = [list(range(len(samples)))]
    with torch.no_grad():
        if step is not None:
            half = (len(samples) + 1) // 2
            groups = [groups[0][:half], groups[0][half:]]
            given = [run.moved(run.make(copied([samples[n] for n in group]))) for group in groups]
            value = float(step(run.model, given))
        else:
            own = _own_mean(run, batch)
            if isinstance(own, str):
                detail = f"{own}; step= shows how a trainer averages"
                return Finding(Check(name="average", status="not shown", detail=detail))
            value = own
    wanted = sum(sums) / sum(counts)
    means = {
        "of samples": [sums[n] / counts[n] for n in range(len(sums)) if counts[n]],
        "of micro-batches": [
            sum(sums[n] for n in group) / max(1, sum(counts[n] for n in group)) for group in groups
        ],
    }
    error = abs(value - wanted) / max(1.0, abs(wanted))
    detail = f"{value:.6f}; over label tokens it is {wanted:.6f}"
    bound = MEAN_BOUND if run.exact else None
    check = bounded("average", error, bound, detail=detail, look_at="the rows above")
    if not check.fails:
        return Finding(check)
    for whose, values in means.items():
        mean = sum(values) / len(values)
        if len(values) > 1 and abs(value - mean) <= MEAN_BOUND * max(1.0, abs(mean)):
            detail = f"the mean {whose}, {mean:.6f}; over label tokens it is {wanted:.6f}"
            look_at = "the divisor: the label tokens of the whole global batch, once"
            return failed("average", "mean of means", detail, look_at, error)
    return Finding(check, "other loss")


def _own_mean(run: Run, batch: Mapping[str, Any]) -> float | str:
    """The model's own loss of a batch, or why it has none that is to be looked at."""
    if run.losses is not None:
        return "losses= computes the batch, so the model's own loss is not what is trained by"
    if run.shifted:
        return "the model's own loss would shift labels that are shifted already"
    try:
        output = run.model(**run.moved(batch), use_cache=False)
    except Exception as error:
        return f"the model, given labels too, {raised(error)}"
    loss = getattr(output, "loss", None)
    return "the model returns no loss" if loss is None else float(loss)
