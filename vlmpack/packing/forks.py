"""Which segments of a row go on from which: what several sequences begin with is a segment of its
own, and stands in the row once.

Three questions about one image, the last one asked of a pair:

    segment   0      1      2      3      4      5
    holds     image  how?   who?   why?   since  as      parents (-1, 0, 0, 0, 3, 3)
    ends             0      1             2      3       the sequence that ends in it

A sequence is its path (parents, the first one first) and the segment that it ends in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forks:
    """Which segments of a row go on from which, as host integers.

    Args:
        parents: for each segment the number of an earlier one that it goes on from; -1 for none.
        lengths: logical lengths of the segments, gaps not counted.
        ends: the segment that each sequence ends in; empty where nobody asks.

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
        """The segments that a segment goes on from, the first one first."""
        found: list[int] = []
        while (number := self.parents[number]) >= 0:
            found.append(number)
        return tuple(reversed(found))

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
