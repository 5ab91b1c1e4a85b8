"""Which process of a replica makes the pixels of which image, before any image is read.

The processes that share the images of a row out each decode those that they will run through the
vision tower, and no others. So all of them must know the same owner of every image, whoever could
read what. It follows from the plan alone: the row's planned patches lie on a line, sample by
sample, cut into equal parts, and an image belongs to the part that its middle lies in.

    planned patches   | a: 64 64 | b: 128 | c: 32 32 |      320, parts of 160 for 2 processes
    middles                32 96     192      272 304
    owner                  0  0      1        1   1

What a sample's own images are is read with its text. A sample that becomes a hole keeps its place
on the line, so nobody has decoded for nothing, and nobody decodes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageOwners:
    """The owners of some images.

    Args:
        ranks: of each image, among the processes that share them out.
        rank: this process; None for one that runs no vision tower.
        size: how many share them out.
    """

    ranks: tuple[int, ...]
    rank: int | None
    size: int

    @property
    def mine(self) -> tuple[bool, ...]:
        """Whether the pixels of each image are made here."""
        return tuple(rank == self.rank for rank in self.ranks)

    def by_rank(self) -> list[list[int]]:
        """Image numbers by rank, ascending."""
        return [
            [number for number, rank in enumerate(self.ranks) if rank == of]
            for of in range(self.size)
        ]


def join_owners(parts: Sequence[ImageOwners | None]) -> ImageOwners | None:
    """The owners of images one after the other; None where no part has any.

    Raises:
        ValueError: parts of several processes, or some with owners beside some without.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    first = known[0]
    if len(known) < len(parts) or any((p.rank, p.size) != (first.rank, first.size) for p in known):
        raise ValueError(f"images of several processes: {[*parts]}; expected those of one")
    return ImageOwners(tuple(rank for part in known for rank in part.ranks), first.rank, first.size)


@dataclass(frozen=True, slots=True)
class RowShare:
    """One process's part of the images of a row.

    Args:
        rank: among the processes that share them out; None for one that runs no vision tower.
        size: how many share them out.
        turn: added to every owner. A row of one image has its middle in the same part always; by
            turns, the rows of a step give each process about as much.
    """

    rank: int | None
    size: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class SampleShare:
    """Where a sample's images lie on the line of its row.

    Args:
        row: whose part of the row.
        before: planned patches of the samples before it.
        total: planned patches of the row.
    """

    row: RowShare
    before: int
    total: int

    def owner(self, before: int, patches: int) -> int:
        """The rank that makes the pixels of an image.

        Args:
            before: patches of the sample's images before it.
            patches: its own.
        """
        size, middle = self.row.size, 2 * (self.before + before) + patches
        part = min(size - 1, middle * size // (2 * max(1, self.total)))
        return (part + self.row.turn) % size

    def owners(self, patches: Sequence[int]) -> ImageOwners:
        """Those of all images of the sample.

        Args:
            patches: of each image, in order.
        """
        ranks, before = [], 0
        for count in patches:
            ranks.append(self.owner(before, count))
            before += count
        return ImageOwners(tuple(ranks), self.row.rank, self.row.size)


def turns_of(patches: Sequence[int], size: int) -> list[int]:
    """The turn of each row of a step, the largest row first.

    Args:
        patches: planned of each row.
        size: how many processes share a row's images out.
    """
    turns = [0] * len(patches)
    for place, row in enumerate(sorted(range(len(patches)), key=lambda n: (-patches[n], n))):
        turns[row] = place % size
    return turns
