"""Where the segments of a row sit, as host integers: alignment, tail, fixed shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from vlmpack.alignment import round_up
from vlmpack.errors import CapabilityError, PackingError
from vlmpack.packing.limits import positive, short_value

MAX_MULTIPLE = 1 << 24
"""The most tokens of a multiple: padding to more is a mistake, and no memory has room for it."""


class UnknownLengths(tuple[int, ...]):
    """The lengths of segments in a captured graph, known by their boundaries alone. Their number
    can be asked. Asking for the lengths is a CapabilityError."""

    __slots__ = ()

    def __new__(cls, count: int) -> UnknownLengths:
        """Stand for `count` segments."""
        return super().__new__(cls, [0] * count)

    def _refuse(self, *_: Any) -> NoReturn:
        raise CapabilityError(
            "the lengths of a row's segments were read on the host inside a captured graph, "
            "which would keep those of the first row. Set training.cuda_graphs: none"
        )

    def __iter__(self) -> Iterator[int]:
        return self._refuse()

    __getitem__ = _refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedShape:
    """One shape for all rows of a run, as CUDA graphs want it.

    Args:
        row_tokens: T of every row. A ghost segment fills it up, without labels or key, and masked
            in the experts' statistics.
        max_sequences: most samples of a row. `cu_seqlens` has this many + 2 entries (the ghost's
            and the leading 0), its last value repeated. None: as many as the row needs.
        overflows: whether a row with more samples may have any shape, instead of an error.
    """

    row_tokens: int
    max_sequences: int | None = None
    overflows: bool = False

    @property
    def most_filled(self) -> int | None:
        """Samples up to which a row gets this shape; None where each does, or is an error."""
        return self.max_sequences if self.overflows else None

    def has_room_for(self, sequences: int) -> bool:
        """Whether a row of so many samples gets this shape; no other one has a shape of its own."""
        return self.most_filled is None or sequences <= self.most_filled

    @property
    def num_segments(self) -> int | None:
        """Segments of every row, the ghost included; None where each has its own number."""
        return None if self.max_sequences is None else self.max_sequences + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where the segments of a row sit, as host integers."""

    lengths: tuple[int, ...]
    pad_to_multiple_of: int = 1
    total_multiple_of: int = 1
    fixed: FixedShape | None = None

    @property
    def physical(self) -> tuple[int, ...]:
        """Physical lengths of the samples."""
        return tuple(round_up(length, self.pad_to_multiple_of) for length in self.lengths)

    @property
    def shows_physical(self) -> bool:
        """Whether the row has physical boundaries even if they repeat the logical ones. Rows of one
        shape have the same tensors, whether or not a sample leaves a gap."""
        return self.fixed is not None and self.pad_to_multiple_of > 1

    @property
    def tail(self) -> int:
        """Length of the tail segment; 0 where none is needed."""
        total = sum(self.physical)
        if self.fixed is not None:
            return self.fixed.row_tokens - total
        return round_up(max(total, 1), max(self.total_multiple_of, 1)) - total

    @property
    def fillers(self) -> tuple[int, ...]:
        """Lengths of the segments behind the samples': the tail, and empty ones up to a fixed
        number of boundaries."""
        tail = (self.tail,) if self.tail else ()
        segments = None if self.fixed is None else self.fixed.num_segments
        if segments is None:
            return tail
        return (*tail, *([0] * (segments - len(self.lengths) - len(tail))))

    def check(self) -> None:
        """Raise PackingError if a multiple is invalid, multiples contradict each other, or the row
        is too small."""
        for name in ("pad_to_multiple_of", "total_multiple_of"):
            if positive(name, getattr(self, name)) > MAX_MULTIPLE:
                value = short_value(getattr(self, name))
                raise PackingError(f"{name} is {value}, expected at most {MAX_MULTIPLE:,}")
        if self.total_multiple_of > 1 and self.total_multiple_of % self.pad_to_multiple_of:
            raise PackingError(
                f"total_multiple_of={self.total_multiple_of} is not a multiple of "
                f"pad_to_multiple_of={self.pad_to_multiple_of}: the tail segment could not be "
                "aligned"
            )
        if self.fixed is None:
            return
        width, segments = self.fixed.row_tokens, self.fixed.num_segments
        total = sum(self.physical)
        multiple = max(self.total_multiple_of, self.pad_to_multiple_of)
        if width < 1 or width % multiple:
            raise PackingError(
                f"a fixed row of {width} tokens is not a multiple of {multiple}, as this parallel "
                "layout needs"
            )
        if total > width:
            raise PackingError(
                f"{len(self.lengths)} samples take {total} tokens, but every row is fixed to "
                f"{width}; pack fewer, or raise packing.max_tokens"
            )
        if segments is not None and len(self.lengths) >= segments:
            raise PackingError(
                f"{len(self.lengths)} samples in a row whose cu_seqlens has room for "
                f"{segments - 1}; pack fewer, or raise packing.max_sequences"
            )
