"""Where the samples' tokens lie in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmpack.proof.judge.reference import Sample


@dataclass(frozen=True, slots=True)
class Place:
    """A sample's tokens in a batch.

    Args:
        row: of the batch.
        start: of its first token in the row.
        stop: behind its last.
    """

    row: int
    start: int
    stop: int


def placed(ids: Tensor, samples: Sequence[Sample]) -> list[Place | None]:
    """Where each sample lies, in any order of rows and samples; None where its tokens are not there
    as they are alone.

    The longest are placed first, since another may begin with a shorter one; what finds its tokens
    taken goes before all others in a further turn.

    Args:
        ids: (B, S).
    """
    order = sorted(range(len(samples)), key=lambda n: -len(samples[n].ids))
    best: dict[int, Place] = {}
    for _ in samples:
        found = _in_turn(ids, samples, order)
        best = max(best, found, key=len)
        lost = [n for n in order if n not in found]
        if not lost or lost[0] == order[0]:  # that one is nowhere
            break
        order = [*lost, *(n for n in order if n in found)]
    return [best.get(n) for n in range(len(samples))]


def _in_turn(ids: Tensor, samples: Sequence[Sample], order: Sequence[int]) -> dict[int, Place]:
    """Each at the first place that those before it have left; those without one are not there."""
    free = torch.ones_like(ids, dtype=torch.bool)
    found = {}
    for number in order:
        at = _first(ids, samples[number].ids, free)
        if at is not None:
            free[at.row, at.start : at.stop] = False
            found[number] = at
    return found


def _first(ids: Tensor, wanted: Tensor, free: Tensor) -> Place | None:
    length = len(wanted)
    if length > ids.shape[1]:
        return None
    for row in range(ids.shape[0]):
        windows = ids[row].unfold(0, length, 1)
        same = (windows == wanted).all(1) & free[row].unfold(0, length, 1).all(1)
        starts = same.nonzero()[:, 0]
        if len(starts):
            return Place(row, int(starts[0]), int(starts[0]) + length)
    return None
