"""One micro-batch as training gets it, next to its samples encoded alone.

Offsets count the slots of the row. The rows of mode `none` are one after the other here: B segments
of S slots. What the checks of a row share stands at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from vlmpack.alignment import Alignment, round_up
from vlmpack.errors import PackingError
from vlmpack.packing import Batch, EncodedSample, PackedBatch, PaddedBatch
from vlmpack.packing.batch import ContextSlice
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.context import padded_as_row, slice_for_context


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """What a row must obey.

    Args:
        context: CP.
        multiples: of segments and of the row, in tokens; padded rows are multiples of the latter.
        budget: of a planned row; None where no budget plans it.
    """

    context: int
    multiples: Alignment
    placeholder_ids: frozenset[int]
    pad_token_id: int
    budget: RowBudget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A micro-batch and what must be in it.

    Args:
        alone: its samples, each encoded alone, in row order; of pairs, their sequences.
        planned: keys of the samples that were to be in it, in the plan's order.
        positions: (A, s) of each sample alone.
        slices: what each context-parallel rank holds; or why the row cannot be cut.
    """

    batch: Batch
    alone: tuple[EncodedSample, ...]
    rules: RowRules
    planned: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    positions: tuple[Tensor, ...] = ()
    counted_by: str = "the family's rule"
    slices: tuple[ContextSlice, ...] | str = ()
    sequences: int = 1
    """Sequences of each sample: 2 of pairs."""

    @property
    def flat(self) -> PackedBatch:
        batch = self.batch
        return padded_as_row(batch) if isinstance(batch, PaddedBatch) else batch

    @property
    def is_padded(self) -> bool:
        return isinstance(self.batch, PaddedBatch)

    @property
    def num_slots(self) -> int:
        """T, the slots of the row."""
        return self.batch.num_slots

    @property
    def ends(self) -> tuple[int, ...]:
        """The slot after each sample's padding, from lengths and rules, not from the batch."""
        lengths = [item.length for item in self.alone]
        if self.is_padded:
            lengths = [round_up(max(lengths, default=0), self.rules.multiples.row)] * len(lengths)
        multiple = self.rules.multiples.sequence
        return tuple(accumulate(round_up(length, multiple) for length in lengths))

    @property
    def starts(self) -> tuple[int, ...]:
        """The slot at which each sample must begin."""
        return (0, *self.ends)[:-1]

    @property
    def boundaries(self) -> list[int]:
        """Physical offsets of the segments, first and last included, as the tensors have them."""
        return [int(place) for place in self.flat.packed_seq_params().cu_seqlens_physical.tolist()]


def cut_row(row: Batch, size: int) -> tuple[ContextSlice, ...] | str:
    """What each of `size` context-parallel ranks holds; or why the row cannot be cut."""
    batch = padded_as_row(row) if isinstance(row, PaddedBatch) else row
    found = []
    for rank in range(size):
        try:
            part = slice_for_context(batch, rank=rank, size=size).context
        except PackingError as error:
            return str(error)
        assert part is not None
        found.append(part)
    return tuple(found)


NO_LOSS = -100
"""The label of a slot without loss; defined again, so that a wrong constant elsewhere shows."""

COLLATOR = "the collator (vlmpack/packing/collate.py)"
BOUNDARIES = "cu_seqlens and segment_lengths of the row"

Counts = tuple[int, ...]
"""What a check counted in one row; of several rows the counts are added."""


class Broken(Exception):
    """A property that does not hold."""

    def __init__(self, detail: str, look_at: str = "") -> None:
        super().__init__(detail)
        self.look_at = look_at


def owners_of(row: Row) -> list[int]:
    """For each slot, its sample or -1; one extra slot belongs to no sample."""
    owners = [-1] * (row.num_slots + 1)
    for number, (item, start) in enumerate(zip(row.alone, row.starts, strict=True)):
        if start + item.length > row.num_slots:
            raise Broken(
                f"{item.key} must be at slots {start} to {start + item.length - 1}, the row has "
                f"{row.num_slots}",
                COLLATOR,
            )
        owners[start : start + item.length] = [number] * item.length
    return owners
