"""Sequences that begin alike -> segments of a row: what they share is laid out once.

Two questions about one image (`i`), and another sample:

    sequences     i i i h o w ?    i i i w h o    t e x t
    segments      i i i | h o w ? | w h o | t e x t         parents (-1, 0, 0, -1)
    positions     0 1 2   3 4 5 6   3 4 5   0 1 2 3         each goes on from the fork
    labels        none    its own   its own its own

Sequences next to one another share the longest prefix that both have (`prefixes` of
`EncodedSample`); one about the same image that stands elsewhere in the row repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from vlmpack.errors import PackingError
from vlmpack.packing.batch import IGNORE_INDEX, EncodedSample, Media, Prefix


class Forking(Protocol):
    """A sequence that may share what it begins with: read already, or planned."""

    @property
    def length(self) -> int:
        """Tokens of it."""

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """Where it may fork, the shorter one first."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of a sequence that become a segment.

    Args:
        parent: the number of the segment that it goes on from; -1 for none.
        sequences: the first that holds it, and the one behind the last.
        start, stop: of its tokens, counted in each of these.
        ends: whether its sequence ends in it; it is then one sequence's own.
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


def stretches_of(parts: Sequence[Forking], *, least: int = 1) -> list[Stretch]:
    """How the sequences of a row are laid out: one stretch each where none share anything.

    Args:
        parts: in the order of the row.
        least: tokens of a shared stretch. With the multiple that segments are rounded up to, a row
            never takes more slots than its sequences take by themselves.
    """
    common = [alike(one, other) for one, other in pairwise(parts)]
    found: list[Stretch] = []
    _lay_out(parts, common, least, (0, len(parts)), (-1, 0), found)
    return found


def alike(one: Forking, other: Forking) -> int:
    """Tokens of the longest prefix that both have."""
    both = set(one.prefixes) & set(other.prefixes)
    return max((prefix.length for prefix in both), default=0)


def _lay_out(
    parts: Sequence[Forking],
    common: Sequence[int],
    least: int,
    span: tuple[int, int],
    before: tuple[int, int],
    found: list[Stretch],
) -> None:
    """Add the stretches of sequences that share the tokens before.

    Args:
        common: tokens that each sequence has in common with the next one.
        least: tokens that are worth a stretch.
        span: the first sequence, and the one behind the last.
        before: the segment that they go on from, and the tokens up to its end.
    """
    parent, start = before
    for first, last in _runs(common, span, start + least):
        if last - first == 1:
            found.append(Stretch(parent, (first, last), start, parts[first].length, ends=True))
            continue
        stop = min(common[first : last - 1])
        found.append(Stretch(parent, (first, last), start, stop, ends=False))
        _lay_out(parts, common, least, (first, last), (len(found) - 1, stop), found)


def _runs(common: Sequence[int], span: tuple[int, int], least: int) -> Iterator[tuple[int, int]]:
    """Runs of neighbours that have so many tokens in common."""
    first, last = span
    for place in range(first, last):
        if place + 1 == last or common[place] < least:
            yield first, place + 1
            first = place + 1


def check_shared(parts: Sequence[EncodedSample], stretches: Sequence[Stretch]) -> None:
    """Check that what stands once is the same in all of its sequences, and is not learnt.

    Raises:
        PackingError: naming the samples.
    """
    for each in stretches:
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


def places_of(parts: Sequence[EncodedSample], stretches: Sequence[Stretch]) -> list[Tensor]:
    """(M_i,) int64: the placeholders of each stretch, counted from its start."""
    found = []
    for each in stretches:
        places = parts[each.sequences[0]].media_positions
        found.append(places[(places >= each.start) & (places < each.stop)] - each.start)
    return found


def shown_media(
    parts: Sequence[EncodedSample], stretches: Sequence[Stretch], places: Sequence[Tensor]
) -> list[Media | None]:
    """The images that each stretch shows. All of a sequence's stand in one stretch, since a prefix
    has all images."""
    return [
        parts[each.sequences[0]].media if len(own) else None
        for each, own in zip(stretches, places, strict=True)
    ]
