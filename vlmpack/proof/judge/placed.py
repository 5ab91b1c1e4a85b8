"""Where the samples' tokens lie in a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmpack.packing import IGNORE_INDEX
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


def located(
    batch: Mapping[str, Any], samples: Sequence[Sample], *, shifted: bool
) -> list[Place | None]:
    """Where each sample lies; samples of the same ids are told apart by their labels, and by their
    images in the order of tokens. None where one's tokens are not there as they are alone.

    Args:
        batch: with `input_ids` (B, S), `labels` (B, S), and images as the model takes them.
        shifted: whether a label stands where it is predicted.
    """
    found = placed(batch["input_ids"], samples)
    where = {number: at for number, at in enumerate(found) if at is not None}
    if len(where) < len(found):
        return found
    rest = list(where)
    before: Counter[str] = Counter()
    for at in sorted(where.values(), key=lambda at: (at.row, at.start)):
        ids = batch["input_ids"][at.row, at.start : at.stop]
        twins = [n for n in rest if torch.equal(samples[n].ids, ids)]
        given = own_labels(batch["labels"], at, shifted=shifted)

        def likeness(n: int, given: Tensor = given) -> tuple[bool, bool]:
            same = torch.equal(given[1:], samples[n].labels[1:])
            return same, _has_media(batch, samples[n].media, before)

        number = twins[0] if len(twins) == 1 else max(twins, key=likeness)
        found[number] = at
        rest.remove(number)
        before.update({name: len(part) for name, part in samples[number].media.items()})
    return found


def _has_media(
    batch: Mapping[str, Any], media: Mapping[str, Tensor], before: Mapping[str, int]
) -> bool:
    """Whether a sample's images are what follows those of the samples before it."""
    for name, part in media.items():
        whole = batch.get(name)
        if not isinstance(whole, Tensor):
            return False
        given = whole[before[name] : before[name] + len(part)]
        if given.shape != part.shape or not torch.equal(given.to(part.dtype), part):
            return False
    return True


def own_labels(labels: Tensor, at: Place, *, shifted: bool) -> Tensor:
    """(s,) the labels of a sample's tokens as transformers has them; of the first one -100.

    Args:
        labels: (B, S) of the batch.
        shifted: whether a label stands where it is predicted.
    """
    given = labels[at.row, at.start : at.stop]
    given = given.roll(1) if shifted else given.clone()
    given[0] = IGNORE_INDEX
    return given


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


def longest_start(ids: Tensor, wanted: Tensor, where: Sequence[Place | None]) -> int:
    """How many of a sample's tokens, from its first one on, stand in a row where no other sample
    lies: of one that was cut what is left of it.

    Args:
        ids: (B, S).
        wanted: (s,) of the sample.
        where: the other samples; None for one that is not there.
    """
    free = torch.ones_like(ids, dtype=torch.bool)
    for at in where:
        if at is not None:
            free[at.row, at.start : at.stop] = False
    lengths = range(1, len(wanted) + 1)
    return bisect_left(lengths, True, key=lambda n: _first(ids, wanted[:n], free) is None)


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
