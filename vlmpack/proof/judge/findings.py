"""What a batch says, compared with what its samples say alone: labels, positions, pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.check import Check
from vlmpack.proof.judge.judgement import Fault, Finding
from vlmpack.proof.judge.placed import Place, own_labels
from vlmpack.proof.judge.reference import Sample

Where = Sequence[Place]


def failed(
    name: str, fault: Fault, detail: str, look_at: str, measured: float | None = None
) -> Finding:
    """A check that failed."""
    check = Check(name=name, status="fail", detail=detail, look_at=look_at, measured=measured)
    return Finding(check, fault)


def check_labels(
    labels: Tensor, samples: Sequence[Sample], where: Where, *, shifted: bool
) -> Finding:
    """Which tokens are taught, and by which token each is predicted.

    Args:
        labels: (B, S) of the batch.
        shifted: whether a label stands where it is predicted.
    """
    for number, (sample, at) in enumerate(zip(samples, where, strict=True)):
        given = own_labels(labels, at, shifted=shifted)
        wanted = sample.labels.clone()
        wanted[0] = IGNORE_INDEX
        if not torch.equal(given, wanted):
            return _other_labels(number, given, sample.labels)
        crossing = _crossing(number, labels, where, shifted=shifted)
        if crossing is not None:
            return crossing
    count = sum(len(sample.taught) for sample in samples)
    return Finding(
        Check(name="labels", status="pass", detail=f"{count} tokens, those taught alone")
    )


def _crossing(number: int, labels: Tensor, where: Where, *, shifted: bool) -> Finding | None:
    """A sample whose first token is taught, or whose last one predicts one that is not its own."""
    at = where[number]
    slot = at.stop - 1 if shifted else at.start
    if (not shifted and not slot) or int(labels[at.row, slot]) == IGNORE_INDEX:
        return None
    beside = at.stop if shifted else at.start - 1
    if beside < labels.shape[1] and not bool(_taken(labels, where)[at.row, beside]):
        words = "its last token predicts padding" if shifted else "padding predicts its first token"
        look_at = "its label, which has to be -100"
        return failed("labels", "labels on padding", f"sample {number}: {words}", look_at)
    return failed(
        "labels",
        "labels across samples",
        f"sample {number}: a token is taught across the boundary of two samples",
        "the label of each sample's first token, which has to be -100",
    )


def _taken(labels: Tensor, where: Where) -> Tensor:
    """(B, S) whether a slot is a sample's."""
    found = torch.zeros_like(labels, dtype=torch.bool)
    for at in where:
        found[at.row, at.start : at.stop] = True
    return found


def check_padding(labels: Tensor, where: Where, *, shifted: bool) -> Finding | None:
    """Slots that are no sample's teach nothing; None where there are none of them.

    Args:
        labels: (B, S) of the batch.
        shifted: whether a label stands where it is predicted.
    """
    name = "labels of padding"
    free = ~_taken(labels, where)
    if not free.any():
        return None
    taught = free & (labels != IGNORE_INDEX)
    if not shifted:
        taught[:, 0] = False  # nothing predicts a row's first token
    count = int(free.sum())
    if not taught.any():
        return Finding(Check(name=name, status="pass", detail=f"{count} slots, none is taught"))
    row, slot = taught.nonzero()[0].tolist()
    place = f"first in row {row}, slot {slot}: label {int(labels[row, slot])}"
    detail = f"{int(taught.sum())} of {count} slots of no sample are taught, {place}"
    look_at = "what labels are padded with, which has to be -100"
    return failed(name, "labels on padding", detail, look_at)


def _other_labels(number: int, given: Tensor, wanted: Tensor) -> Finding:
    first = int((given != wanted).nonzero()[0, 0])
    place = f"sample {number}, token {first}: label {int(given[first])}, alone {int(wanted[first])}"
    if torch.equal(given[1:-1], wanted[2:]):
        return failed(
            "labels",
            "double shift",
            f"{place}; each label stands one place early, and the model shifts again",
            "who shifts: the collator or the model, not both",
        )
    if torch.equal(given[2:], wanted[1:-1]):
        return failed(
            "labels", "label shift", f"{place}; each label stands one place late", "the shift"
        )
    return failed("labels", "other labels", place, "the loss mask")


def check_positions(
    given: Tensor | None, samples: Sequence[Sample], where: Where, *, packed: bool, opaque: bool
) -> Finding | None:
    """Positions of each sample; None where the batch leaves them to the model and may.

    Args:
        given: `position_ids` (B, S), (A, B, S) or None.
        packed: whether a row holds several samples.
        opaque: whether what computes the batch may count positions itself.
    """
    name = "positions"
    if given is None:
        if not packed:
            return None
        if opaque:
            detail = "the batch has none, so losses= has to count them, from 0 at each sample"
            return Finding(Check(name=name, status="not shown", detail=detail))
        return failed(
            name,
            "positions over the row",
            "a row of several samples without position_ids: the model counts over the whole row",
            "positions, which restart at each sample",
        )
    axes = given[None] if given.dim() == 2 else given
    most = max(at.stop for at in where), max(at.row for at in where) + 1
    if axes.dim() != 3 or axes.shape[2] < most[0] or axes.shape[1] < most[1]:
        detail = f"position_ids {tuple(given.shape)} for rows of {most[0]} tokens or more"
        return failed(name, "other positions", detail, "its shape: (B, S), or (A, B, S)")
    for number, (sample, at) in enumerate(zip(samples, where, strict=True)):
        own = axes[:, at.row, at.start : at.stop]
        length = at.stop - at.start
        plain = torch.arange(length)[None]
        if sample.positions is None:
            if not torch.equal(own[:1], plain):
                return _other_positions(number, own[0], plain[0], at)
            continue
        wanted = sample.positions
        is_flat = bool((wanted == plain).all())
        if len(axes) == 1 and not is_flat:
            return failed(
                name,
                "one-axis positions",
                f"sample {number} has images: one axis, its class counts {len(wanted)}",
                "get_rope_index of the model's class, for each sample by itself",
            )
        mine = own[-len(wanted) :] if len(axes) > 1 else own.expand(len(wanted), -1)
        if not torch.equal(mine, wanted):
            axis = int((mine != wanted).any(1).nonzero()[0, 0])
            if is_flat is False and torch.equal(mine, plain.expand_as(mine)):
                return failed(
                    name,
                    "one-axis positions",
                    f"sample {number} has images, and all axes count 0, 1, 2, ...",
                    "get_rope_index of the model's class, for each sample by itself",
                )
            return _other_positions(number, mine[axis], wanted[axis], at)
    return Finding(Check(name=name, status="pass", detail="restart at each sample, as alone"))


def _other_positions(number: int, given: Tensor, wanted: Tensor, at: Place) -> Finding:
    first = int((given != wanted).nonzero()[0, 0])
    place = f"sample {number}, token {first}: {int(given[first])}, alone {int(wanted[first])}"
    steady = bool((given - given[0] == wanted - wanted[0]).all())
    if at.start and steady:
        detail = f"{place}; they run on from the samples before it"
        return failed("positions", "positions over the row", detail, "where they restart")
    return failed("positions", "other positions", place, "how they are counted")


def check_pixels(batch: Mapping[str, Any], samples: Sequence[Sample]) -> list[Finding]:
    """The images of the batch are those of its samples, in the order of their tokens."""
    names = dict.fromkeys(name for sample in samples for name in sample.media)
    found = []
    for name in names:
        parts = [sample.media[name] for sample in samples if name in sample.media]
        given = batch.get(name)
        whole = torch.cat(parts) if len({part.shape[1:] for part in parts}) == 1 else None
        if not isinstance(given, Tensor) or whole is None:
            have = "samples have it in several shapes" if whole is None else "the batch has it not"
            found.append(Finding(Check(name=name, status="not shown", detail=have)))
            continue
        if given.shape == whole.shape and torch.equal(given.to(whole.dtype), whole):
            check = Check(name=name, status="pass", detail=f"{len(parts)} samples, in order")
            found.append(Finding(check))
            continue
        same = given.shape == whole.shape and torch.equal(
            _sorted_rows(given.to(whole.dtype)), _sorted_rows(whole)
        )
        fault: Fault = "pixels swapped" if same else "other pixels"
        detail = (
            "the samples' own, in another order than their tokens"
            if same
            else f"{tuple(given.shape)} numbers that are not the samples' ({tuple(whole.shape)})"
        )
        look_at = "the order of images in the batch" if same else "what is done with pixels"
        found.append(failed(name, fault, detail, look_at))
    return found


def _sorted_rows(value: Tensor) -> Tensor:
    rows = value.reshape(len(value), -1).double()
    weights = torch.linspace(1.0, 2.0, rows.shape[1], dtype=torch.float64)
    return rows[torch.argsort(rows @ weights)]
