"""Sequences with a common prefix -> segments of a row, which holds the prefix once.

Two questions about one image (`i`), and another sample:

    sequences     i i i h o w ?    i i i w h o    t e x t
    segments      i i i | h o w ? | w h o | t e x t         parents (-1, 0, 0, -1)
    positions     0 1 2   3 4 5 6   3 4 5   0 1 2 3         each continues its prefix
    labels        none    its own   its own its own

Neighbours share the longest prefix that both have (`EncodedSample.prefixes`). A sequence about the
same image elsewhere in the row repeats the prefix.

Plans use the same function, so a planned row is as large as the built one:

    order    a0 a1 a2 | b0 | c0 c1      neighbours with an equal cut are one item of the packer
    row      [A a0 a1 a2] [b0] ...      A once, and each sample's own

An item is as many neighbours as share a prefix and fit a row together. A group that exceeds a row
is split, and the next item repeats its prefix. The packer takes items as units, so it never splits
a group that fits a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vlmpack.alignment import round_up
from vlmpack.errors import PackingError
from vlmpack.packing.batch import IGNORE_INDEX, EncodedSample, Media, Prefix
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.limits import Integers


class PrefixSequence(Protocol):
    """A sequence that may share its beginning. It is read already, or planned."""

    @property
    def length(self) -> int:
        """Tokens of it."""

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """Prefixes that it may share, the shorter one first."""


@dataclass(frozen=True, slots=True)
class PrefixSegment:
    """Tokens of a sequence that become a segment.

    Args:
        parent: the number of the segment that it continues; -1 for none.
        sequences: the first that holds it, and one past the last.
        start, stop: of its tokens, counted in each of these.
    """

    parent: int
    sequences: tuple[int, int]
    start: int
    stop: int
    ends: bool

    @property
    def length(self) -> int:
        """Tokens of it."""
        return self.stop - self.start


def prefix_segments(parts: Sequence[PrefixSequence], *, least: int = 1) -> list[PrefixSegment]:
    """The segments of a row's sequences; one for each sequence where none share anything.

    Args:
        least: least tokens of a shared segment. If it is the alignment multiple, a row never takes
            more slots than its sequences take separately.
    """
    common = [alike(one, other) for one, other in pairwise(parts)]
    segments: list[PrefixSegment] = []
    _lay_out(parts, common, least, (0, len(parts)), (-1, 0), segments)
    return segments


def alike(one: PrefixSequence, other: PrefixSequence) -> int:
    """Tokens of the longest prefix that both have."""
    both = set(one.prefixes) & set(other.prefixes)
    return max((prefix.length for prefix in both), default=0)


def _lay_out(
    parts: Sequence[PrefixSequence],
    common: Sequence[int],
    least: int,
    span: tuple[int, int],
    before: tuple[int, int],
    segments: list[PrefixSegment],
) -> None:
    """Add the segments of sequences that share the tokens before.

    Args:
        common: tokens that each sequence has in common with the next one.
        span: the first sequence, and one past the last.
        before: the segment that they continue, and the tokens up to its end.
    """
    parent, start = before
    for first, last in _runs(common, span, start + least):
        if last - first == 1:
            segments.append(
                PrefixSegment(parent, (first, last), start, parts[first].length, ends=True)
            )
            continue
        stop = min(common[first : last - 1])
        segments.append(PrefixSegment(parent, (first, last), start, stop, ends=False))
        _lay_out(parts, common, least, (first, last), (len(segments) - 1, stop), segments)


def _runs(common: Sequence[int], span: tuple[int, int], least: int) -> Iterator[tuple[int, int]]:
    """Runs of neighbours that have so many tokens in common."""
    first, last = span
    for place in range(first, last):
        if place + 1 == last or common[place] < least:
            yield first, place + 1
            first = place + 1


def check_prefix_tokens(parts: Sequence[EncodedSample], segments: Sequence[PrefixSegment]) -> None:
    """Check that shared tokens are equal in all of their sequences and have no labels.

    Raises:
        PackingError: naming the samples.
    """
    for each in segments:
        first, *others = parts[slice(*each.sequences)]
        place = slice(each.start, each.stop)
        if others and bool((first.labels[place] != IGNORE_INDEX).any()):
            raise PackingError(
                f"sample {first.key!r}: a label stands among the {each.stop} tokens of a prefix; "
                "what is shared is not learnt"
            )
        for other in others:
            if not (
                torch.equal(first.input_ids[place], other.input_ids[place])
                and torch.equal(first.position_ids[:, place], other.position_ids[:, place])
                and _same_images(first, other)
            ):
                raise PackingError(
                    f"samples {first.key!r} and {other.key!r} have a prefix of one digest, "
                    f"{each.stop} tokens long, but other tokens, positions or images in it"
                )


def _same_images(one: EncodedSample, other: EncodedSample) -> bool:
    mine, theirs = one.media, other.media
    if mine is None or theirs is None or mine is theirs:
        return mine is theirs
    return mine.grid_thw == theirs.grid_thw and torch.equal(mine.pixel_values, theirs.pixel_values)


def places_of(parts: Sequence[EncodedSample], segments: Sequence[PrefixSegment]) -> list[Tensor]:
    """(M_i,) int64: the placeholders of each segment, counted from its start."""
    indices = []
    for each in segments:
        places = parts[each.sequences[0]].media_positions
        indices.append(places[(places >= each.start) & (places < each.stop)] - each.start)
    return indices


def shown_media(
    parts: Sequence[EncodedSample], segments: Sequence[PrefixSegment], places: Sequence[Tensor]
) -> list[Media | None]:
    """The images that each segment shows. All of a sequence's stand in one segment, since a prefix
    has all images."""
    return [
        parts[each.sequences[0]].media if len(own) else None
        for each, own in zip(segments, places, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence that is not read yet, and the prefixes that it may share, shorter ones first."""

    length: int
    prefixes: tuple[Prefix, ...]


PlannedSample = tuple[PlannedSequence, ...]
"""The sequences of a sample: two of a pair, else one."""


@dataclass(frozen=True, slots=True)
class Item:
    """Neighbouring samples that a row takes together."""

    places: range
    tokens: int
    patches: int


def planned_tokens(samples: Sequence[PlannedSample], alignment: int) -> int:
    """Slots of some samples in a row, one behind the other, what they share once."""
    return sum(round_up(each.length, alignment) for each in planned_segments(samples, alignment))


def planned_segments(samples: Sequence[PlannedSample], alignment: int) -> list[PrefixSegment]:
    """How some samples are laid out in a row; arguments as of `planned_tokens`."""
    sequences = [sequence for sample in samples for sequence in sample]
    return prefix_segments(sequences, least=alignment)


def items_of(
    samples: Sequence[PlannedSample], patches: Sequence[int], budget: RowBudget
) -> Iterator[Item]:
    """Neighbours that share something, as many at a time as fit a row."""
    most = len(samples) if budget.max_sequences is None else budget.max_sequences
    first = 0
    while first < len(samples):
        company = 1
        while first + company < len(samples) and company < most:
            place = first + company
            if not goes_on(samples[place - 1], samples[place], budget.alignment):
                break
            company += 1
        fitting, tokens = _fitting(samples[first : first + company], budget)
        yield Item(range(first, first + fitting), tokens, patches[first])
        first += fitting


def _fitting(samples: Sequence[PlannedSample], budget: RowBudget) -> tuple[int, int]:
    """How many neighbours, from the first on, fit a row together, and their tokens. At least one is
    taken.

    The number is found by bisection. A further sample takes more tokens, except where rounding up
    decides. Then a larger number than the one found may fit.
    """
    low, high = 1, len(samples)
    while low < high:
        middle = (low + high + 1) // 2
        if budget.takes(planned_tokens(samples[:middle], budget.alignment)):
            low = middle
        else:
            high = middle - 1
    return low, planned_tokens(samples[:low], budget.alignment)


def shared_rows(
    samples: Sequence[PlannedSample], patches: Integers, budget: RowBudget
) -> list[list[int]]:
    """Rows of samples that come in order, as places in that order; as `RowBudget.rows`, by items.

    The packer counts items. It holds as many as the lengths of the samples alone ask for. Where
    patches have no bound, samples are its second quantity. Otherwise a row with more than
    `budget.max_sequences` samples is cut between items.
    """
    items = list(items_of(samples, patches.tolist(), budget))
    tokens = np.asarray([item.tokens for item in items], dtype=np.int64)
    second = np.asarray([item.patches for item in items], dtype=np.int64)
    alone = [sum(round_up(each.length, budget.alignment) for each in one) for one in samples]
    waiting = budget.waiting(np.asarray(alone, dtype=np.int64))
    items_alone = replace(budget, max_sequences=None, buffer=waiting)
    if budget.max_patches is None and budget.max_sequences is not None:
        items_alone = replace(items_alone, max_patches=budget.max_sequences)
        second = np.asarray([len(item.places) for item in items], dtype=np.int64)
    rows = []
    for row in items_alone.rows(tokens, second):
        rows += _within(budget.max_sequences, [items[place].places for place in row])
    return rows


def _within(most: int | None, items: Sequence[range]) -> list[list[int]]:
    """The places of some items, in as many rows as a bound on samples asks for."""
    rows: list[list[int]] = [[]]
    for places in items:
        if most is not None and rows[-1] and len(rows[-1]) + len(places) > most:
            rows.append([])
        rows[-1] += places
    return rows


def goes_on(one: PlannedSample, other: PlannedSample, least: int) -> bool:
    """Whether a sample has so many tokens in common with the one before it."""
    return alike(one[-1], other[0]) >= least
