"""Leak tests. A change of one sample may not move others, and its loss may give them no gradients.

Forward: ids and pixels of one sample are replaced at the same lengths, and the row runs again. The
final hidden states of all other slots, the tail's included, are compared bit by bit. They determine
the logits. An engine with its own model has losses of label tokens instead.

Backward, for models with recurrent layers: backward kernels may ignore boundaries that the forward
pass keeps. The loss of one sample must have zero gradient in the decoder's inputs of other slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmpack.data.protocols import Collator
from vlmpack.packing import IGNORE_INDEX, EncodedSample
from vlmpack.packing.pairs import join_pair, sequences_of
from vlmpack.proof.measure import (
    SHARED_MATMUL_BOUND,
    Check,
    Leaks,
    Trial,
    other_pixels,
    other_tokens,
    quotient,
    relative_l2,
)
from vlmpack.proof.verify.packed import Packed, PackedRun
from vlmpack.proof.verify.samples import VerifiedRow
from vlmpack.words import some_of

NAME = "leak test"
GRADIENTS = "leak test of gradients"


def perturbed(sample: EncodedSample, ordinary: Tensor) -> EncodedSample:
    """The sample with other ordinary tokens and other pixels. Everything else is the same."""
    media = sample.media
    if media is not None:
        media = replace(media, pixel_values=other_pixels(media.pixel_values))
    return replace(sample, input_ids=other_tokens(sample.input_ids, ordinary), media=media)


@dataclass(frozen=True, slots=True)
class _Change:
    """Other contents of a row; sequences at the places `own` may move."""

    name: str
    samples: list[EncodedSample]
    own: tuple[int, ...]


def _changes(row: VerifiedRow, ordinary: Tensor) -> Iterator[_Change]:
    """Each sample in turn; of pairs each answer with its prompt, and then the images of both."""
    each = row.sequences
    for place, sample in enumerate(row.samples):
        before, after = list(row.samples[:place]), list(row.samples[place + 1 :])
        if each == 1:
            changed = perturbed(sample, ordinary)
            yield _Change(sample.key, [*before, changed, *after], (place,))
            continue
        sides = sequences_of(sample)
        for side, own in enumerate(sides):
            other = replace(perturbed(own, ordinary), media=sample.media)
            pair = join_pair(other, sides[1]) if side == 0 else join_pair(sides[0], other)
            at = each * place + side
            yield _Change(row.names[at], [*before, pair, *after], (at,))
        if sample.media is not None:
            pair = replace(sample, media=perturbed(sample, ordinary).media)
            both = (each * place, each * place + 1)
            yield _Change(f"the images of {sample.key}", [*before, pair, *after], both)


def check_leaks(
    run: PackedRun,
    collator: Collator,
    rows: Sequence[VerifiedRow],
    ordinary: Tensor,
    *,
    shared_matmuls: bool,
    exact: bool = True,
) -> Check:
    """Perturb every sample of every row in turn, each answer of a pair by itself. Collective.

    Args:
        rows: each with two samples or more.
        ordinary: token ids that may replace others, without special ones.
        shared_matmuls: whether samples share matmuls, so that the last bit may differ.
        exact: whether that last bit is one of float32; in bfloat16 it has no bound.
    """
    bound = SHARED_MATMUL_BOUND if shared_matmuls else 0.0
    leaks = Leaks()
    for row in rows:
        before = run.run([row], backward=False)
        names = [name for name, _, _ in row.spans]
        unseen = [place for place in range(len(row.starts)) if not _shows(row, place, before)]
        for change in _changes(row, ordinary):
            after = run.run([replace(row, batch=collator(change.samples))], backward=False)
            moved = _differences(row, before, after)
            # NaN does not say that a sample stayed.
            unknown = [place for place, error in enumerate(moved) if math.isnan(error)]
            leaks.add(Trial(change.name, change.own, moved, [*unseen, *unknown]), names, bound)
    if not leaks.trials:
        return Check(
            name=NAME, status="too few", detail="no row has room for two samples: nothing can leak"
        )
    check = Check(name=NAME, status="fail", measured=leaks.largest, bound=bound)
    if leaks.unmoved:
        detail = f"changing {some_of(leaks.unmoved)} changed nothing of its own"
        return replace(
            check, detail=detail, look_at="whether the model reads ids and pixels at all"
        )
    if leaks.pairs and shared_matmuls and not exact and math.isfinite(leaks.largest):
        detail = (
            f"{leaks.trials} samples in turn; experts' matmuls are blocked by the number of their "
            f"tokens: rerun without --dtype"
        )
        return replace(check, status="shown", bound=None, detail=detail)
    check = replace(check, look_at="what mixes slots: attention, recurrent layers, the tower")
    if leaks.pairs:
        return replace(check, detail=some_of((" moves ".join(pair) for pair in leaks.pairs), 2))
    said = "bit by bit the same" if bound == 0.0 else "the same but for the experts' last bits"
    return replace(
        check, status="pass", detail=f"{leaks.trials} samples in turn, the others {said}"
    )


def _shows(row: VerifiedRow, place: int, before: Packed) -> bool:
    """Whether a change of a sample can be seen; where only losses are known, it needs labels."""
    slots = range(row.starts[place], row.ends[place])
    return bool(before.hidden) or any(slot in slots for slot in before.losses.get(0, {}))


def _differences(row: VerifiedRow, before: Packed, after: Packed) -> list[float]:
    """Relative L2 of what the slots of each span compute, padding included."""
    differences = []
    for _, start, end in row.spans:
        if before.hidden:
            differences.append(relative_l2(after.hidden[0][start:end], before.hidden[0][start:end]))
            continue
        was, now = before.losses.get(0, {}), after.losses.get(0, {})
        slots = [slot for slot in sorted(was) if start <= slot < end]
        differences.append(
            relative_l2(
                torch.tensor([now[slot] for slot in slots]),
                torch.tensor([was[slot] for slot in slots]),
            )
        )
    return differences


def check_gradient_leaks(run: PackedRun, rows: Sequence[VerifiedRow]) -> Check:
    """Learn from every sample of every row in turn; gradients remain. Collective.

    Args:
        rows: each with two samples or more.
    """
    leaks = Leaks()
    for row in rows:
        names = [name for name, _, _ in row.spans]
        for place, sample in enumerate(row.alone):
            if not bool((sample.labels != IGNORE_INDEX).any()):
                continue
            name, *slots = row.spans[place]
            gradient = run.input_gradient(row, *slots).double()
            parts = [float(gradient[start:end].norm()) for _, start, end in row.spans]
            moved = [quotient(part, float(gradient.norm())) for part in parts]
            leaks.add(Trial(f"the loss of {name}", [place], moved), names, 0.0)
    if not leaks.trials:
        detail = "no row has labels beside another sample: nothing can leak"
        return Check(name=GRADIENTS, status="too few", detail=detail)
    check = Check(name=GRADIENTS, status="fail", measured=leaks.largest, bound=0.0)
    wrong = [f"{loss} has a gradient in {other}" for loss, other in leaks.pairs]
    wrong += [f"{loss} has no gradient of its own" for loss in leaks.unmoved]
    if wrong:
        look_at = "the backward pass of what mixes slots: recurrent layers, attention"
        return replace(check, detail=some_of(wrong, 2), look_at=look_at)
    detail = f"{leaks.trials} losses in turn, zero in every other segment"
    return replace(check, status="pass", detail=detail)


def gradient_leaks_not_looked_for() -> Check:
    """The check for an engine with its own model, where gradient leaks are not looked for."""
    return Check(
        name=GRADIENTS,
        status="shown",
        detail="not looked for: it reads the gradients of what enters transformers' own decoder, "
        "which this engine does not run. model.backend: hf looks",
    )
