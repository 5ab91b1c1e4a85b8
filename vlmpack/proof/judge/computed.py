"""What comes out of a batch: losses, gradients, how losses are averaged, and leaks.

For leaks one sample at a time is changed, and no other sample's losses may move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vlmpack.errors import VlmpackError
from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge.alone import CPU, Alone, Place, Sample, copied, device_of, locate, on
from vlmpack.proof.judge.findings import Finding, failed
from vlmpack.proof.measure import (
    GRADIENT_BOUND,
    LOSS_BOUND,
    MEAN_BOUND,
    Check,
    Leaks,
    Trial,
    bounded,
    error_together,
    gradient_errors,
    loss_error,
    ordinary_ids,
    other_pixels,
    other_tokens,
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
    """The value that a collator returned is no batch."""


class Run:
    """Makes batches, on the CPU, and computes them, where the model is."""

    def __init__(
        self, model: Any, collate: Collate, losses: Losses | None, *, shifted: bool
    ) -> None:
        self.model, self.collate, self.losses = model, collate, losses
        self.shifted, self.device = shifted, device_of(model)
        self.exact = all(one.dtype in EXACT for one in model.parameters())

    def make(self, samples: Sequence[Any]) -> Mapping[str, Any]:
        """The batch that the collator makes of samples, for inspection.

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
        batch: Mapping[str, Any] = on(dict(made), CPU)
        return batch

    def moved(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        moved: Mapping[str, Any] = copied(on(batch, self.device))
        return moved

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """(L,) losses of the label tokens, with their graph."""
        batch = self.moved(batch)
        if self.losses is not None:
            losses = self.losses(self.model, batch)
            if not isinstance(losses, Tensor) or losses.dim() != 1:
                raise TypeError(f"losses= returned {what_is(losses)}; expected a tensor (L,)")
            return losses
        given = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.model(**given, use_cache=False).logits
        return token_losses(logits, batch["labels"], shifted=self.shifted)


def how_many(batch: Mapping[str, Any], values: Tensor, *, shifted: bool) -> str:
    """The problem with the number of losses. Empty if there is one for each label token."""
    labels = batch["labels"] if shifted else batch["labels"][:, 1:]
    count = int((labels != IGNORE_INDEX).sum())
    return "" if len(values) == count else f"{len(values)} losses, and {count} label tokens"


def by_sample(
    batch: Mapping[str, Any], values: Tensor, where: Sequence[Place], *, shifted: bool
) -> list[Tensor]:
    """(l,) values of each sample's label tokens, on the CPU; empty if their number is wrong."""
    values = values.detach().cpu()
    labels = batch["labels"] if shifted else batch["labels"][:, 1:]
    rows, slots = (labels != IGNORE_INDEX).nonzero().unbind(1)
    parts = []
    for at in where:
        mine = (rows == at.row) & (slots >= at.start) & (slots < at.stop - (not shifted))
        parts.append(values[mine] if len(values) == len(rows) else values[:0])
    return parts


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


def check_gradients(run: Run, computed: Tensor, stock: Mapping[str, Tensor]) -> list[Finding]:
    """Gradients of the mean loss over all label tokens, by part of the model."""
    run.model.zero_grad(set_to_none=True)
    if not len(computed) or not computed.requires_grad:
        detail = (
            "the losses have no graph" if len(computed) else "there is no loss of a label token"
        )
        check = Check(name="gradients", status="not shown", detail=detail)
        return [Finding(check)]
    computed.mean().backward()
    errors = gradient_errors(stock, take_gradients(run.model).items())
    parts: dict[str, list[str]] = {}
    for name in stock:
        parts.setdefault(_part_of(name), []).append(name)
    findings = []
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
        findings.append(Finding(check, "other gradients" if check.fails else ""))
    if not findings:
        detail = "none of the parameters that are compared has one"
        findings.append(Finding(Check(name="gradients", status="not shown", detail=detail)))
    return findings


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
    stock: Sequence[Sample],
) -> Finding:
    """How losses are averaged: over label tokens, or over means of them."""
    sums = [float(sample.losses.double().sum()) for sample in stock]
    counts = [len(sample.losses) for sample in stock]
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
    expected = sum(sums) / sum(counts)
    means = {
        "of samples": [sums[n] / counts[n] for n in range(len(sums)) if counts[n]],
        "of micro-batches": [
            sum(sums[n] for n in group) / max(1, sum(counts[n] for n in group)) for group in groups
        ],
    }
    error = abs(value - expected) / max(1.0, abs(expected))
    detail = f"{value:.6f}; over label tokens it is {expected:.6f}"
    bound = MEAN_BOUND if run.exact else None
    check = bounded("average", error, bound, detail=detail, look_at="the rows above")
    if not check.fails:
        return Finding(check)
    for whose, values in means.items():
        mean = sum(values) / len(values)
        if len(values) > 1 and abs(value - mean) <= MEAN_BOUND * max(1.0, abs(mean)):
            detail = f"the mean {whose}, {mean:.6f}; over label tokens it is {expected:.6f}"
            look_at = "the divisor: the label tokens of the whole global batch, once"
            return failed("average", "mean of means", detail, look_at, error)
    return Finding(check, "other loss")


def _own_mean(run: Run, batch: Mapping[str, Any]) -> float | str:
    """The model's own loss of a batch, or the reason why it cannot be used."""
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


@dataclass(frozen=True, slots=True)
class Changes:
    """How samples are changed, a remark on it, and other possible causes of a leak."""

    change: Callable[[Any], Any]
    alone: Alone
    note: str = ""
    other_cause: str = ""


def changes_of(
    model: Any,
    samples: Sequence[Any],
    alone: Alone,
    change: Callable[[Any], Any] | None,
    findings: Sequence[Finding],
) -> Changes:
    """How to look for leaks, given earlier findings about pixels.

    Pixels at another sample's tokens move that sample by themselves. Then our change leaves pixels
    as they are.

    Args:
        change: the caller's; None for ours.
    """
    pixels_differ = any(one.fault in ("pixels swapped", "other pixels") for one in findings)
    if change is not None:
        cause = "; it may come from the pixels of the rows above" if pixels_differ else ""
        return Changes(change, alone, other_cause=cause)
    note = "; ids alone were changed, since pixels are not the samples' own" * pixels_differ
    return Changes(changer(model, samples, media=not pixels_differ), alone, note=note)


def check_isolation(
    run: Run,
    samples: Sequence[Any],
    stock: Sequence[Sample],
    where: Sequence[Place],
    before: Sequence[Tensor],
    changes: Changes,
) -> Finding:
    """Each sample changed in turn: no other's losses may move.

    Args:
        before: (l,) losses of each sample in the unchanged batch. They have a graph, like those of
            the changed ones, since kernels without a graph may differ in the last bit.
    """
    leaks, compared = Leaks(), 0
    names = [f"sample {number}" for number in range(len(samples))]
    unseen = [number for number, losses in enumerate(before) if not len(losses)]
    for number, sample in enumerate(samples):
        changed = changes.change(copied(sample))
        batch = run.make(copied([*samples[:number], changed, *samples[number + 1 :]]))
        known = list(stock)
        known[number] = _known(stock[number], on(changes.alone(copied(changed)), CPU))
        there = _again(batch, known, where, shifted=run.shifted)
        computed = run(batch)
        after = by_sample(batch, computed, there, shifted=run.shifted)
        moved = [_moved(one, two) for one, two in zip(before, after, strict=True)]
        showed = moved[number] > 0.0 or number in unseen
        compared += sum(
            showed and place not in unseen and _could_see(at, where[number])
            for place, at in enumerate(where)
            if place != number and not math.isnan(moved[place])
        )
        moved = [0.0 if math.isnan(by) else by for by in moved]  # nan is for the rows of losses
        leaks.add(Trial(names[number], [number], moved, unseen), names, LOSS_BOUND)
    if leaks.pairs:
        more = f", the first of {len(leaks.pairs)} such pairs" if len(leaks.pairs) > 1 else ""
        return failed(
            "isolation",
            "isolation",
            f"{' moves '.join(leaks.pairs[0])}{more}{changes.other_cause}{changes.note}",
            "boundaries, which have to reach every attention layer",
            leaks.largest,
        )
    if not compared:
        detail = how_many(batch, computed, shifted=run.shifted)
        detail = detail or "no change that showed has label tokens of another sample behind it"
        return Finding(Check(name="isolation", status="not shown", detail=detail))
    detail = f"{len(samples)} samples changed in turn, the others did not move{changes.note}"
    if leaks.unmoved:
        detail = f"{detail}; the change of {leaks.unmoved[0]} did not show in its own losses"
    status: Literal["pass", "shown"] = "shown" if leaks.unmoved else "pass"
    return Finding(Check(name="isolation", status=status, measured=leaks.largest, detail=detail))


def _known(before: Sample, arguments: Mapping[str, Any]) -> Sample:
    media = {name: arguments[name] for name in before.media}
    return replace(
        before, ids=arguments["input_ids"][0], labels=arguments["labels"][0], media=media
    )


def _again(
    batch: Mapping[str, Any], samples: Sequence[Sample], where: Sequence[Place], *, shifted: bool
) -> Sequence[Place]:
    """Where the samples lie in another batch of them; if unknown, where they were."""
    places = [at for at in locate(batch, samples, shifted=shifted) if at is not None]
    return places if len(places) == len(where) else where


def _moved(one: Tensor, two: Tensor) -> float:
    """By how much a sample's losses differ; 1 for another number of them."""
    if one.shape != two.shape:
        return 1.0
    return float((one - two).abs().max()) if len(one) else 0.0


def _could_see(place: Place, changed: Place) -> bool:
    """Whether causal attention without boundaries would show a change there."""
    return place.row != changed.row or place.start > changed.start


def changer(model: Any, samples: Sequence[Any], *, media: bool = True) -> Callable[[Any], Any]:
    """Changes ordinary tokens and, with `media`, pixels; ids that config.json names stay."""
    named: set[int] = set()
    for config in (model.config, *vars(model.config).values()):
        for name, value in getattr(config, "to_dict", dict)().items():
            if name.endswith(("token_id", "token_index")):
                named |= {value} if isinstance(value, int) else set()
                named |= set(value) if isinstance(value, list) else set()

    if not all(isinstance(sample, Mapping) and "input_ids" in sample for sample in samples):
        raise VlmpackError("judge: samples are no mappings with input_ids; give change=")
    ordinary = ordinary_ids((torch.as_tensor(sample["input_ids"]) for sample in samples), named)

    def change(sample: Any) -> Any:
        ids = other_tokens(torch.as_tensor(sample["input_ids"]), ordinary)
        labels = torch.as_tensor(sample["labels"])
        labels = torch.where(labels == IGNORE_INDEX, labels, ids)
        made = {**sample}
        for name, changed in (("input_ids", ids), ("labels", labels)):
            made[name] = changed.tolist() if isinstance(sample[name], list) else changed
        for name, value in sample.items():
            if media and isinstance(value, Tensor) and value.is_floating_point():
                made[name] = other_pixels(value)
        return made

    return change
