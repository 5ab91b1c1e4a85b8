"""The tree of a row's segments. A prefix that sequences share is a segment of its own.

Three questions about one image, the last one asked of a pair:

    segment   0      1      2      3      4      5
    holds     image  how?   who?   why?   since  as      parents (-1, 0, 0, 0, 3, 3)
    ends             0      1             2      3       the sequence that ends in it

A sequence is the segment that it ends in, preceded by its prefix, which is that segment's chain of
parents.

Varlen calls need the same in slots. The host computes that once, where it makes the row. A letter
is one slot:

    segment   0      1   2   3    4  5
    holds     i i i  h   w   y y  a  b       parents (-1, 0, 0, 0, 3, 3)
    depth 0   queries h w y y a b            keys i i i     all that continues segment 0
    depth 1   queries a b                    keys y y       all that continues segment 3

Queries of one call have no slot twice. Those of a deeper call are a subset of the call before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vlmpack.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Which segments of a row continue which, as host integers.

    Args:
        parents: for each segment the number of an earlier one that it continues; -1 for none.
        lengths: logical lengths of the segments, gaps not counted.
        ends: the segment that each sequence ends in; empty unless requested.

    Raises:
        ValueError: a parent that is no earlier segment, or lists of unequal lengths.
    """

    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.lengths):
            raise ValueError(
                f"{len(self.parents)} parents for {len(self.lengths)} segments; expected one each"
            )
        for number, parent in enumerate(self.parents):
            if not -1 <= parent < number:
                raise ValueError(
                    f"segment {number} goes on from segment {parent}; expected an earlier one, or "
                    f"-1 for none"
                )

    def path(self, number: int) -> tuple[int, ...]:
        """The segments that a segment continues, the first one first."""
        path: list[int] = []
        while (number := self.parents[number]) >= 0:
            path.append(number)
        return tuple(reversed(path))

    def whole(self, sequence: int) -> tuple[int, ...]:
        """The segments of a sequence, in its own order."""
        end = self.ends[sequence]
        return (*self.path(end), end)

    @property
    def num_segments(self) -> int:
        """Segments that hold tokens of sequences; those behind them fill the row up."""
        return max(self.ends, default=-1) + 1

    @property
    def num_tokens(self) -> int:
        """Tokens of sequences that stand in the row, a shared one once."""
        return sum(self.lengths[: self.num_segments])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLevel:
    """All segments at one depth that others continue, with those that continue them.

    Args:
        branches: (B,) int64, slots of the continuing segments, each in one run.
        prefixes: (P,) int64, slots of the continued segments, without gaps.
        cu_branches, cu_prefixes: (N + 1,) int32, boundaries of the runs of both.
        max_branches, max_prefixes: the longest run of both, host integers.
    """

    branches: Tensor
    prefixes: Tensor
    cu_branches: Tensor
    cu_prefixes: Tensor
    max_branches: int
    max_prefixes: int


def prefix_levels(prefix_tree: PrefixTree, physical: Sequence[int]) -> tuple[PrefixLevel, ...]:
    """The levels of a row, from segments without a parent down.

    Args:
        physical: lengths of its segments, gaps counted.

    Raises:
        CapabilityError: branches that do not stand together behind their segment.
    """
    starts = [*accumulate(physical, initial=0)]
    depths: list[int] = []
    for parent in prefix_tree.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    behind, last = [0] * len(starts), [*range(len(starts))]  # how many go on, and the last of them
    for number in range(len(prefix_tree.parents) - 1, -1, -1):
        parent = prefix_tree.parents[number]
        if parent >= 0:
            behind[parent] += 1 + behind[number]
            last[parent] = max(last[parent], last[number])
    levels: dict[int, list[tuple[range, range]]] = {}
    for number, (depth, tokens) in enumerate(zip(depths, prefix_tree.lengths, strict=True)):
        if not behind[number]:
            continue
        if last[number] - number != behind[number]:
            raise CapabilityError(
                "varlen calls take branches side by side behind what they go on from; this row "
                "has others: set model.attention to segments"
            )
        queries = range(starts[number + 1], starts[last[number] + 1])
        keys = range(starts[number], starts[number] + tokens)
        levels.setdefault(depth, []).append((queries, keys))
    return tuple(_level(levels[depth]) for depth in sorted(levels))


def _level(runs: Sequence[tuple[range, range]]) -> PrefixLevel:
    """One level of a row, from runs of queries, each with its keys."""
    queries, keys = zip(*runs, strict=True)
    return PrefixLevel(
        branches=_slots(queries),
        prefixes=_slots(keys),
        cu_branches=_bounds(queries),
        cu_prefixes=_bounds(keys),
        max_branches=max(map(len, queries)),
        max_prefixes=max(map(len, keys)),
    )


def _slots(places: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(each.start, each.stop) for each in places])


def _bounds(places: Sequence[range]) -> Tensor:
    return torch.tensor([0, *accumulate(map(len, places))], dtype=torch.int32)
