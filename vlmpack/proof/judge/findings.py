"""Compares a batch with its samples alone: labels, positions, pixels.

Each comparison is a `Finding`: a check, with the name of its fault. All of them are a `Judgement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge.alone import Place, Sample, own_labels
from vlmpack.proof.measure import Check
from vlmpack.words import counted, kind_of

Fault = Literal[
    "",
    "isolation",
    "positions over the row",
    "one-axis positions",
    "other positions",
    "label shift",
    "double shift",
    "labels across samples",
    "labels on padding",
    "other labels",
    "pixels swapped",
    "other pixels",
    "coordinates beyond the image",
    "tokens lost",
    "samples written",
    "mean of means",
    "other loss",
    "other gradients",
    "refused",
]
"""What a failed check is called; empty where it passed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A check, and the fault that it shows."""

    check: Check
    fault: Fault = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """All that was compared; `str()` of it is a table.

    Args:
        findings: in the order in which a fault has consequences.
    """

    findings: tuple[Finding, ...]
    samples: int
    label_tokens: int

    @property
    def passed(self) -> bool:
        """Whether the batch computes what its samples do alone."""
        return not self.faults

    @property
    def faults(self) -> tuple[str, ...]:
        """Names of the faults, in the order of their consequences."""
        return tuple(dict.fromkeys(one.fault for one in self.findings if one.fault))

    def to_dict(self) -> dict[str, Any]:
        """The judgement as plain values."""
        return {
            "passed": self.passed,
            "faults": list(self.faults),
            "samples": self.samples,
            "label_tokens": self.label_tokens,
            "checks": [asdict(one.check) | {"fault": one.fault} for one in self.findings],
        }

    def __str__(self) -> str:
        said = [f"{self.samples} samples, {self.label_tokens} label tokens"]
        for one in self.findings:
            check = one.check
            figure = "" if check.measured is None else f" {check.measured:.1e}"
            bound = "" if check.bound is None else f" (bound {check.bound:.0e})"
            fault = f" {one.fault.upper()}:" if one.fault else ""
            said.append(f"  {check.status:9} {check.name}:{fault}{figure}{bound} {check.sentence}")
        verdict = "right" if self.passed else f"wrong: {', '.join(self.faults)}"
        judged = ("pass", "fail")
        unseen = [one.check.name for one in self.findings if one.check.status not in judged]
        verdict += f"; not judged: {', '.join(unseen)}" if unseen else ""
        return "\n".join([*said, verdict])


Where = Sequence[Place]
POSITIONS = "positions"
"""The row about them."""


def failed(
    name: str, fault: Fault, detail: str, look_at: str, measured: float | None = None
) -> Finding:
    check = Check(name=name, status="fail", detail=detail, look_at=look_at, measured=measured)
    return Finding(check, fault)


def check_labels(
    labels: Tensor, samples: Sequence[Sample], where: Where, *, shifted: bool
) -> Finding:
    """Which tokens are taught, and by which token each is predicted."""
    for number, (sample, at) in enumerate(zip(samples, where, strict=True)):
        given = own_labels(labels, at, shifted=shifted)
        expected = sample.labels.clone()
        expected[0] = IGNORE_INDEX
        if not torch.equal(given, expected):
            return _other_labels(number, given, sample.labels)
        crossing = _crossing(number, labels, where, shifted=shifted)
        if crossing is not None:
            return crossing
    count = sum(len(sample.taught) for sample in samples)
    return Finding(
        Check(name="labels", status="pass", detail=f"{count} tokens, those taught alone")
    )


def _crossing(number: int, labels: Tensor, where: Where, *, shifted: bool) -> Finding | None:
    """A sample whose first token is learnt, or whose last one predicts the next sample."""
    at = where[number]
    slot = at.stop - 1 if shifted else at.start
    if (not shifted and not slot) or int(labels[at.row, slot]) == IGNORE_INDEX:
        return None
    neighbour = at.stop if shifted else at.start - 1
    if neighbour < labels.shape[1] and not bool(_taken(labels, where)[at.row, neighbour]):
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
    taken = torch.zeros_like(labels, dtype=torch.bool)
    for at in where:
        taken[at.row, at.start : at.stop] = True
    return taken


def check_padding(labels: Tensor, where: Where, *, shifted: bool) -> Finding | None:
    """Slots of no sample have no label. None if there are no such slots."""
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


def _other_labels(number: int, given: Tensor, expected: Tensor) -> Finding:
    first = int((given != expected).nonzero()[0, 0])
    place = (
        f"sample {number}, token {first}: label {int(given[first])}, alone {int(expected[first])}"
    )
    if torch.equal(given[1:-1], expected[2:]):
        return failed(
            "labels",
            "double shift",
            f"{place}; each label stands one place early, and the model shifts again",
            "who shifts: the collator or the model, not both",
        )
    if torch.equal(given[2:], expected[1:-1]):
        return failed(
            "labels", "label shift", f"{place}; each label stands one place late", "the shift"
        )
    if bool((given == IGNORE_INDEX).all()):
        count = int((expected[1:] != IGNORE_INDEX).sum())
        place = f"sample {number} has no label left, alone {count}: all of them are {IGNORE_INDEX}"
    return failed("labels", "other labels", place, "the loss mask")


def check_positions(
    given: Tensor | None, samples: Sequence[Sample], where: Where, *, packed: bool, opaque: bool
) -> list[Finding]:
    """Positions of each sample; each fault of theirs with the first sample that has it.

    Args:
        given: `position_ids` (B, S), (A, B, S) or None.
        packed: whether a row holds several samples.
        opaque: whether what computes the batch may count positions itself.
    """
    if given is None:
        return [_no_positions(packed=packed, opaque=opaque)]
    axes = given[None] if given.dim() == 2 else given
    most = max(at.stop for at in where), max(at.row for at in where) + 1
    if axes.dim() != 3 or axes.shape[2] < most[0] or axes.shape[1] < most[1]:
        detail = f"position_ids {tuple(given.shape)} for rows of {most[0]} tokens or more"
        return [failed(POSITIONS, "other positions", detail, "its shape: (B, S), or (A, B, S)")]
    findings: dict[Fault, Finding] = {}
    before = _lengths_before(samples, where)
    for number, (sample, at) in enumerate(zip(samples, where, strict=True)):
        own = axes[:, at.row, at.start : at.stop]
        if sample.behind is not None and torch.equal(own[-len(sample.behind) :], sample.behind):
            detail = f"sample {number}: its text is behind the video; in its class {_INSIDE}"
            look_at = "alone=, which may give position_ids: then they are what is compared with"
            findings["other positions"] = failed(POSITIONS, "other positions", detail, look_at)
            continue
        for one in _positions_of(number, own, sample.positions, before[number]):
            findings.setdefault(one.fault, one)
    detail = "restart at each sample, as alone"
    if any(sample.behind is not None for sample in samples):
        detail += f"; {_INSIDE}"
    return list(findings.values()) or [Finding(Check(name=POSITIONS, status="pass", detail=detail))]


_INSIDE = (
    "text behind a video stands inside the video's time, as transformers 5 counts it: the largest "
    "position plus one is the paper's, earlier versions', and vlmpack's (docs/video.md)"
)


def _no_positions(*, packed: bool, opaque: bool) -> Finding:
    """What a batch without `position_ids` is: right or not, where the model counts each row."""
    if packed and not opaque:
        return failed(
            POSITIONS,
            "positions over the row",
            "a row of several samples without position_ids: the model counts over the whole row",
            "positions, which restart at each sample",
        )
    who = "losses= has to count them, from 0 at each sample" if packed else "the model counts them"
    detail = f"the batch has none, so {who}; losses and gradients say whether they are right"
    return Finding(Check(name=POSITIONS, status="not shown", detail=detail))


def _lengths_before(samples: Sequence[Sample], where: Where) -> list[tuple[int, int, int]]:
    """What lies before each sample in its row: slots, tokens, and positions.

    An image may have fewer positions than tokens.
    """
    lengths = []
    for at in where:
        rest = [
            one
            for one, other in zip(samples, where, strict=True)
            if other.row == at.row and other.start < at.start
        ]
        tokens = [len(one.ids) for one in rest]
        counted_to = [
            length if one.positions is None else int(one.positions.max()) + 1
            for one, length in zip(rest, tokens, strict=True)
        ]
        lengths.append((at.start, sum(tokens), sum(counted_to)))
    return lengths


def _positions_of(
    number: int, own: Tensor, alone: Tensor | None, before: tuple[int, int, int]
) -> list[Finding]:
    """What is wrong with a sample's positions: one thing or, where those of an image count on one
    axis and over the row, two.

    Args:
        own: (A, s) in the batch.
        alone: (A, s) as its class counts them; None where it has no counter.
        before: the length of what lies before it in its row, however that is counted.
    """
    plain = torch.arange(own.shape[1])[None]
    expected = plain if alone is None else alone
    given = own[:1] if alone is None else own
    mine = given[-len(expected) :] if len(given) > 1 else given.expand(len(expected), -1)
    has_images = not bool((expected == plain).all())
    if torch.equal(mine, expected) and not (has_images and len(own) == 1):
        return []
    is_plain = torch.equal(mine - mine[:, :1], plain.expand_as(mine))
    runs_on = is_plain or torch.equal(mine - mine[:, :1], expected - expected[:, :1])
    findings = []
    shifts = set((mine[:, 0] - expected[:, 0]).tolist()) - {0}
    if runs_on and shifts and shifts <= set(before):
        what = "run on from the samples" if before[1] else "count the padding"
        detail = f"{_first_position(number, mine, expected)}; they {what} before it"
        findings.append(failed(POSITIONS, "positions over the row", detail, "where they restart"))
    if has_images and (len(own) == 1 or is_plain):
        axes = f"one axis, its class counts {len(expected)}" if len(own) == 1 else _ALL_PLAIN
        detail = f"sample {number} has images: {axes}"
        look_at = "get_rope_index of the model's class, for each sample by itself"
        findings.append(failed(POSITIONS, "one-axis positions", detail, look_at))
    if not findings:
        detail = _first_position(number, mine, expected)
        findings.append(failed(POSITIONS, "other positions", detail, "how they are counted"))
    return findings


_ALL_PLAIN = "all axes count one by one, as those of text do"


def _first_position(number: int, given: Tensor, expected: Tensor) -> str:
    """Where (A, s) differ first, on the first axis that does."""
    axis, first = (given != expected).nonzero()[0].tolist()
    place = f"sample {number}, token {first}"
    return f"{place}: {int(given[axis, first])}, alone {int(expected[axis, first])}"


def check_pixels(
    batch: Mapping[str, Any], samples: Sequence[Sample], *, opaque: bool
) -> list[Finding]:
    """The images of the batch are those of its samples, in the order of their tokens.

    Args:
        samples: in the order of the batch.
        opaque: whether what computes the batch may have images from elsewhere.
    """
    names = dict.fromkeys(name for sample in samples for name in sample.media)
    findings = []
    for name in names:
        parts = [sample.media[name] for sample in samples if name in sample.media]
        given = batch.get(name)
        if given is None and not opaque and _are_pixels(parts[0]):
            have = f"the batch has none, and {counted(len(parts), 'sample has', 'samples have')} it"
            findings.append(
                failed(name, "other pixels", have, "what the collator does with images")
            )
            continue
        whole = torch.cat(parts) if len({part.shape[1:] for part in parts}) == 1 else None
        if not isinstance(given, Tensor) or whole is None:
            have = "the batch has it not" if given is None else f"the batch has {kind_of(given)}"
            have = "samples have it in several shapes" if whole is None else have
            findings.append(Finding(Check(name=name, status="not shown", detail=have)))
            continue
        if given.shape == whole.shape and torch.equal(given.to(whole.dtype), whole):
            check = Check(name=name, status="pass", detail=f"{len(parts)} samples, in order")
            findings.append(Finding(check))
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
        findings.append(failed(name, fault, detail, look_at))
    return findings


def _are_pixels(value: Tensor) -> bool:
    """Whether an argument holds pixels. A model may need no grids, sizes and times of frames."""
    return value.is_floating_point() and value.dim() > 1


def _sorted_rows(value: Tensor) -> Tensor:
    rows = value.reshape(len(value), -1).double()
    weights = torch.linspace(1.0, 2.0, rows.shape[1], dtype=torch.float64)
    return rows[torch.argsort(rows @ weights)]
