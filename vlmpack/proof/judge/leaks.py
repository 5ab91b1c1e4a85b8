"""One sample changed, the others looked at: nothing of them may move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vlmpack.errors import VlmpackError
from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge.alone import CPU, Alone, Place, Sample, copied, located, on
from vlmpack.proof.judge.computed import Run, by_sample, how_many
from vlmpack.proof.judge.findings import Finding, failed
from vlmpack.proof.measure import (
    LOSS_BOUND,
    Check,
    Leaks,
    Trial,
    ordinary_ids,
    other_pixels,
    other_tokens,
)


@dataclass(frozen=True, slots=True)
class Changes:
    """How samples are changed.

    Args:
        change: a sample -> one of the same length with other contents.
        alone: a sample -> the model's own arguments for it.
        note: what else is to be said of the change.
        other_cause: what a leak may come from besides.
    """

    change: Callable[[Any], Any]
    alone: Alone
    note: str = ""
    other_cause: str = ""


def changes_of(
    model: Any,
    samples: Sequence[Any],
    alone: Alone,
    change: Callable[[Any], Any] | None,
    found: Sequence[Finding],
) -> Changes:
    """How to look for leaks, after what was found of pixels.

    Pixels that lie at another sample's tokens move that one by themselves: then ids alone are
    changed, where the change is ours.

    Args:
        change: somebody's; None for ours.
        found: so far.
    """
    pixels_differ = any(one.fault in ("pixels swapped", "other pixels") for one in found)
    if change is not None:
        cause = "; it may come from the pixels of the rows above" if pixels_differ else ""
        return Changes(change, alone, other_cause=cause)
    note = "; ids alone were changed, since pixels are not the samples' own" * pixels_differ
    return Changes(changer(model, samples, media=not pixels_differ), alone, note=note)


def check_isolation(
    run: Run,
    samples: Sequence[Any],
    reference: Sequence[Sample],
    where: Sequence[Place],
    before: Sequence[Tensor],
    changes: Changes,
) -> Finding:
    """Each sample changed in turn: no other's losses may move.

    Args:
        before: (l,) losses of each sample in the unchanged batch. With a graph, as those of the
            changed ones here: kernels may compute a last bit otherwise without one.
    """
    leaks, compared = Leaks(), 0
    names = [f"sample {number}" for number in range(len(samples))]
    unseen = [number for number, losses in enumerate(before) if not len(losses)]
    for number, sample in enumerate(samples):
        changed = changes.change(copied(sample))
        batch = run.make(copied([*samples[:number], changed, *samples[number + 1 :]]))
        known = list(reference)
        known[number] = _known(reference[number], on(changes.alone(copied(changed)), CPU))
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
            f"{leaks.pairs[0]}{more}{changes.other_cause}{changes.note}",
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
    """A changed sample, to be found in a batch."""
    media = {name: arguments[name] for name in before.media}
    return replace(
        before, ids=arguments["input_ids"][0], labels=arguments["labels"][0], media=media
    )


def _again(
    batch: Mapping[str, Any], samples: Sequence[Sample], where: Sequence[Place], *, shifted: bool
) -> Sequence[Place]:
    """Where the samples lie in another batch of them: where they were, if they cannot be told."""
    found = [at for at in located(batch, samples, shifted=shifted) if at is not None]
    return found if len(found) == len(where) else where


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
