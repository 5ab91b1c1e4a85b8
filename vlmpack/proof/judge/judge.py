"""The judge itself: what is run, in which order, and what each figure is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vlmpack.errors import VlmpackError
from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.check import Check
from vlmpack.proof.judge.findings import check_labels, check_pixels, check_positions, failed
from vlmpack.proof.judge.judgement import Finding, Judgement
from vlmpack.proof.judge.placed import Place, placed
from vlmpack.proof.judge.reference import (
    Alone,
    Sample,
    alone_of,
    references,
    token_losses,
)
from vlmpack.proof.verify.compare import loss_error
from vlmpack.proof.verify.figures import GRADIENT_BOUND, LOSS_BOUND
from vlmpack.proof.verify.reference import take_gradients
from vlmpack.words import kind_of

Losses = Callable[[Any, Mapping[str, Any]], Tensor]
"""(model, batch) -> (L,) losses of the batch's label tokens, row by row, with their graph."""

Step = Callable[[Any, Sequence[Mapping[str, Any]]], Tensor]
"""(model, micro-batches) -> the 0-d loss that one optimizer step differentiates."""

MEAN_BOUND = 1e-5
"""Relative error of a mean of losses that are each right to LOSS_BOUND."""


def judge(
    model: Any,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    samples: Sequence[Any],
    *,
    alone: Alone = alone_of,
    labels: Literal["unshifted", "shifted"] = "unshifted",
    losses: Losses | None = None,
    step: Step | None = None,
    change: Callable[[Any], Any] | None = None,
) -> Judgement:
    """Whether a batch that somebody's collator makes computes what its samples do alone.

    Args:
        model: a transformers model with its head, in float32 (other types are compared with their
            own rounding, and fail); it is put into eval mode, and its gradients are dropped.
        collate: a list of samples -> a batch: a mapping with `input_ids` (B, S), `labels` (B, S)
            and whatever the model takes; rows padded or packed.
        samples: two or more, as `collate` takes them; some with images where the model takes them.
        alone: a sample -> the model's own arguments for it, as a batch of one. By default samples
            are mappings of unbatched values, as transformers' collators take them.
        labels: `unshifted` as transformers has them (the model shifts), or `shifted`: a label
            stands where it is predicted.
        losses: how the batch is computed; by default `model(**batch)`, and the cross entropy of its
            logits.
        step: what a trainer makes of several micro-batches, to see how it averages; None: the
            model's own loss of one batch, where it returns one.
        change: a sample -> one of the same length with other contents, for the search for leaks; by
            default its ordinary tokens and pixels are changed.

    Returns:
        What was found; see `Judgement`.

    Raises:
        VlmpackError: fewer than two samples, or some that cannot be run alone.
    """
    if len(samples) < 2:
        raise VlmpackError(f"judge: {len(samples)} samples; packing needs two or more to be wrong")
    model.eval()
    reference, gradients = references(model, samples, alone)
    total = sum(len(sample.losses) for sample in reference)
    made = _batch(collate, list(samples))
    if isinstance(made, Finding):
        return Judgement((made,), len(samples), total)
    where, lost = _places(made, reference)
    if lost is not None:
        return Judgement((lost,), len(samples), total)
    is_shifted = labels == "shifted"
    packed = len({at.row for at in where}) < len(where)
    positions = made.get("position_ids")
    found = [check_labels(made["labels"], reference, where, shifted=is_shifted)]
    if (checked := check_positions(positions, reference, where, packed=packed)) is not None:
        found.append(checked)
    found += check_pixels(made, _in_order(reference, where))
    run = _Run(model, losses, is_shifted)
    try:
        computed = run(made)
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        refusal = f"the model raised {type(error).__name__}: {words}"
        found.append(failed("forward", "refused", refusal, "the arguments of the batch"))
        return Judgement(tuple(found), len(samples), total)
    found.append(_leaks(run, collate, samples, reference, where, change or _changer(model)))
    found.append(_check_losses(made, computed, reference, where, is_shifted))
    found += _check_gradients(model, computed, gradients)
    # The model's own loss is not what is trained by where losses= is; it shifts labels again that
    # are shifted already.
    if (losses is None and not is_shifted) or step is not None:
        found += _check_mean(model, step, collate, samples, made, reference)
    return Judgement(tuple(_with_causes(found)), len(samples), total)


class _Run:
    """Computes a batch."""

    def __init__(self, model: Any, losses: Losses | None, shifted: bool) -> None:
        self.model, self.losses, self.shifted = model, losses, shifted

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        if self.losses is not None:
            return self.losses(self.model, batch)
        given = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.model(**given, use_cache=False).logits
        return token_losses(logits, batch["labels"], shifted=self.shifted)


def _batch(collate: Any, samples: list[Any]) -> Mapping[str, Any] | Finding:
    try:
        made = collate(samples)
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        detail = f"the collator raised {type(error).__name__}: {words}"
        return failed("collate", "refused", detail, "the samples that it takes")
    lacks = [n for n in ("input_ids", "labels") if n not in made] if _is_mapping(made) else []
    if not _is_mapping(made) or lacks:
        what = f"a mapping without {', '.join(lacks)}" if lacks else kind_of(made)
        detail = f"the collator returned {what}; expected input_ids (B, S), labels (B, S) ..."
        return failed("collate", "refused", detail, "what it returns")
    return dict(made)


def _is_mapping(value: object) -> bool:
    return hasattr(value, "keys") and hasattr(value, "__getitem__")


def _places(
    batch: Mapping[str, Any], samples: Sequence[Sample]
) -> tuple[list[Place], Finding | None]:
    found = placed(batch["input_ids"], samples)
    lost = [number for number, at in enumerate(found) if at is None]
    if lost:
        detail = f"sample {lost[0]}: its {len(samples[lost[0]].ids)} tokens are not in the batch"
        return [], failed("tokens", "tokens lost", detail, "truncation, and what expands images")
    return [at for at in found if at is not None], None


def _in_order(samples: Sequence[Sample], where: Sequence[Place]) -> list[Sample]:
    """The samples as they follow each other in the batch."""
    order = sorted(range(len(where)), key=lambda n: (where[n].row, where[n].start))
    return [samples[number] for number in order]


def _by_sample(
    batch: Mapping[str, Any], values: Tensor, where: Sequence[Place], *, shifted: bool
) -> list[Tensor]:
    """(l,) of the values of each sample's label tokens."""
    labels = batch["labels"] if shifted else batch["labels"][:, 1:]
    rows, slots = (labels != IGNORE_INDEX).nonzero().unbind(1)
    found = []
    for at in where:
        mine = (rows == at.row) & (slots >= at.start) & (slots < at.stop - (not shifted))
        found.append(values[mine] if len(values) == len(rows) else values[:0])
    return found


def _check_losses(
    batch: Mapping[str, Any],
    computed: Tensor,
    samples: Sequence[Sample],
    where: Sequence[Place],
    shifted: bool,
) -> Finding:
    ours = _by_sample(batch, computed.detach(), where, shifted=shifted)
    errors = [loss_error(one, sample.losses) for one, sample in zip(ours, samples, strict=True)]
    beyond = [number for number, error in enumerate(errors) if not error <= LOSS_BOUND]
    worst = max(range(len(errors)), key=lambda n: errors[n])
    check = Check(
        name="loss of each sample",
        status="fail" if beyond else "pass",
        measured=errors[worst],
        bound=LOSS_BOUND,
        detail=f"sample {beyond[0]} is the first of {len(beyond)}" if beyond else "as alone",
        look_at="the rows above",
    )
    return Finding(check, "other loss" if beyond else "")


def _check_gradients(
    model: Any, computed: Tensor, reference: Mapping[str, Tensor]
) -> list[Finding]:
    """Gradients of the mean loss over all label tokens, by part of the model."""
    if not computed.requires_grad:
        check = Check(name="gradients", status="shown", detail="the losses have no graph")
        return [Finding(check)]
    computed.mean().backward()
    ours = take_gradients(model)
    parts: dict[str, list[str]] = {}
    for name in reference:
        parts.setdefault(_part_of(name), []).append(name)
    found = []
    for part, names in parts.items():
        error = sum(float((ours[n] - reference[n]).double().square().sum()) for n in names)
        scale = sum(float(reference[n].double().square().sum()) for n in names)
        if scale == 0.0 and error == 0.0:
            continue
        relative = (error / scale) ** 0.5 if scale else float("inf")
        bad = not relative <= GRADIENT_BOUND
        check = Check(
            name=f"gradients: {part}",
            status="fail" if bad else "pass",
            measured=relative,
            bound=GRADIENT_BOUND,
            detail=f"{len(names)} parameters",
            look_at="the rows above",
        )
        found.append(Finding(check, "other gradients" if bad else ""))
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


def _leaks(
    run: _Run,
    collate: Any,
    samples: Sequence[Any],
    reference: Sequence[Sample],
    where: Sequence[Place],
    change: Callable[[Any], Any],
) -> Finding:
    """Each sample changed in turn: no other's losses may move."""
    largest, leaks, unmoved = 0.0, [], []
    with torch.no_grad():
        batch = collate(list(samples))
        before = _by_sample(batch, run(batch), where, shifted=run.shifted)
        for number, sample in enumerate(samples):
            others = [*samples[:number], change(sample), *samples[number + 1 :]]
            batch = collate(others)
            after = _by_sample(batch, run(batch), where, shifted=run.shifted)
            for place, (one, two) in enumerate(zip(before, after, strict=True)):
                same = one.shape == two.shape
                moved = float((one - two).abs().max()) if same and len(one) else float(not same)
                if place == number:
                    unmoved += [number] * (moved == 0.0 and len(one) > 0)
                elif moved > LOSS_BOUND:
                    largest = max(largest, moved)
                    leaks.append(f"sample {number} moves sample {place}")
    if leaks:
        more = f" and {len(leaks) - 1} more" if len(leaks) > 1 else ""
        return failed(
            "isolation",
            "isolation",
            f"{leaks[0]}{more}",
            "boundaries, which have to reach every attention layer",
            largest,
        )
    detail = f"{len(samples)} samples changed in turn, the others did not move"
    if unmoved:
        detail = f"{detail}; the change of sample {unmoved[0]} did not show in its own losses"
    status: Literal["pass", "shown"] = "shown" if unmoved else "pass"
    return Finding(Check(name="isolation", status=status, measured=largest, detail=detail))


def _changer(model: Any) -> Callable[[Any], Any]:
    """Other ordinary tokens and other pixels; ids that config.json names keep their place."""
    named: set[int] = set()
    for config in (model.config, *vars(model.config).values()):
        for name, value in getattr(config, "to_dict", dict)().items():
            if name.endswith(("token_id", "token_index")):
                named |= {value} if isinstance(value, int) else set()
                named |= set(value) if isinstance(value, list) else set()

    def change(sample: Any) -> Any:
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            raise VlmpackError("judge: samples are no mappings with input_ids; give change=")
        ids = torch.as_tensor(sample["input_ids"]).clone()
        labels = torch.as_tensor(sample["labels"]).clone()
        taught = labels != IGNORE_INDEX
        ordinary = torch.tensor([int(one) not in named for one in ids])
        ids[ordinary] = ids[ordinary].roll(1)
        labels[taught] = ids[taught]
        made = {**sample, "input_ids": ids, "labels": labels}
        for name, value in sample.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                made[name] = 0.5 - value.flip(0)
        return made

    return change


def _check_mean(
    model: Any,
    step: Step | None,
    collate: Any,
    samples: Sequence[Any],
    batch: Mapping[str, Any],
    reference: Sequence[Sample],
) -> list[Finding]:
    """How losses are averaged: over label tokens, or over means of them."""
    sums = [float(sample.losses.double().sum()) for sample in reference]
    counts = [len(sample.losses) for sample in reference]
    groups = [list(range(len(samples)))]
    with torch.no_grad():
        if step is not None:
            half = (len(samples) + 1) // 2
            groups = [groups[0][:half], groups[0][half:]]
            given = [collate([samples[n] for n in group]) for group in groups]
            value = float(step(model, given))
        else:
            try:
                output = model(**batch, use_cache=False)
            except Exception:
                return []
            if getattr(output, "loss", None) is None:
                return []
            value = float(output.loss)
    wanted = sum(sums) / sum(counts)
    means = {
        "of samples": [sums[n] / counts[n] for n in range(len(sums)) if counts[n]],
        "of micro-batches": [
            sum(sums[n] for n in group) / max(1, sum(counts[n] for n in group)) for group in groups
        ],
    }
    error = abs(value - wanted) / max(1.0, abs(wanted))
    check = Check(
        name="average", status="pass", measured=error, bound=MEAN_BOUND, detail="by token"
    )
    if error <= MEAN_BOUND:
        return [Finding(check)]
    for whose, values in means.items():
        mean = sum(values) / len(values)
        if len(values) > 1 and abs(value - mean) <= MEAN_BOUND * max(1.0, abs(mean)):
            detail = f"the mean {whose}, {mean:.6f}; over label tokens it is {wanted:.6f}"
            look_at = "the divisor: the label tokens of the whole global batch, once"
            return [failed("average", "mean of means", detail, look_at, error)]
    detail = f"{value:.6f}; over label tokens it is {wanted:.6f}"
    return [failed("average", "other loss", detail, "the rows above", error)]


def _with_causes(found: Sequence[Finding]) -> list[Finding]:
    """Losses and gradients that differ are named where nothing before them explains it."""
    causes = {one.fault for one in found} - {"", "other loss", "other gradients", "mean of means"}
    if not causes:
        return list(found)
    follow = ("other loss", "other gradients")
    return [Finding(one.check, "" if one.fault in follow else one.fault) for one in found]
