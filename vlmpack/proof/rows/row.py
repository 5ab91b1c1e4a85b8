"""One row as training gets it, next to its samples encoded alone.

Offsets count the slots of the row. Rows of mode `none` are one after the other here: B segments of
S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor

from vlmpack.alignment import Alignment
from vlmpack.data.index.table import SampleRef
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder
from vlmpack.errors import PackingError
from vlmpack.packing import CostModel, EncodedSample, PackedBatch, PaddedBatch
from vlmpack.packing.batch import ContextSlice
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.context import padded_as_row, slice_for_context
from vlmpack.proof.rows.show import (
    ShownBin,
    ShownSample,
    load_bin,
    read_again,
    refs_of,
    take_apart,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """What the row was made by.

    Args:
        mode: `packing.mode`.
        context: CP.
        multiples: of segments and of the row, in tokens.
        budget: of a planned row; None where no budget plans it.
        placeholder_id, pad_token_id: of the encoder.
        cost: FLOPs of the model at hand.
    """

    mode: str
    context: int
    multiples: Alignment
    budget: RowBudget | None
    placeholder_id: int
    pad_token_id: int
    cost: CostModel


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the row: a sample with its alignment gap, or the tail, which holds no sample.

    Args:
        number: its place, from 0.
        start: first slot.
        length: slots of the sample; 0 for a tail.
        slots: `length` and the gap behind it.
        logical: (begin, end) in `cu_seqlens`.
        sample: None for a tail.
    """

    number: int
    start: int
    length: int
    slots: int
    logical: tuple[int, int]
    sample: ShownSample | None

    @property
    def end(self) -> int:
        """The slot behind it."""
        return self.start + self.slots

    @property
    def name(self) -> str:
        """The sample's key."""
        return "tail" if self.sample is None else self.sample.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row (or the rows of one micro-batch, in mode `none`).

    Args:
        shown: the batch taken apart.
        batch: its tensors, as one row.
        alone: its samples, each encoded alone again, in row order.
        positions: (A, s) of each, by the model family's rule.
        planned: keys of the bin's samples, holes included, in the plan's order.
        slices: what each context-parallel rank holds; or why the row cannot be cut.
        rules: what it was made by.
        num_rows: B in mode `none`; 1 for a packed row.
    """

    shown: ShownBin
    batch: PackedBatch
    alone: tuple[EncodedSample, ...]
    positions: tuple[Tensor, ...]
    planned: tuple[str, ...]
    slices: tuple[ContextSlice, ...] | str
    rules: RowRules
    num_rows: int

    @property
    def is_padded(self) -> bool:
        """Whether these are padded rows, mode `none`."""
        return self.rules.mode == "none"

    @property
    def num_slots(self) -> int:
        """T."""
        return self.batch.num_slots

    @property
    def boundaries(self) -> list[int]:
        """Physical offsets of the segments, first and last included, as the tensors have them."""
        batch = self.batch
        found = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
        return [int(place) for place in found.tolist()]

    @property
    def segments(self) -> list[Segment]:
        """In row order; repeats of the last boundary, which hold nothing, are left out."""
        physical, logical = self.boundaries, self.batch.cu_seqlens.tolist()
        found = []
        for number, (start, end) in enumerate(pairwise(physical)):
            has_sample = number < len(self.shown.samples)
            if end <= start and not has_sample:
                continue
            found.append(
                Segment(
                    number=number,
                    start=start,
                    length=self.batch.lengths[number] if has_sample else 0,
                    slots=end - start,
                    logical=(logical[number], logical[number + 1]),
                    sample=self.shown.samples[number] if has_sample else None,
                )
            )
        return found

    def flops(self) -> tuple[float, float]:
        """Of a training step on this row, padding included: language model, vision tower."""
        batch = self.batch
        grids = batch.media.grid_thw if batch.media is not None else ()
        patches = [t * h * w for t, h, w in grids]
        found = self.rules.cost(
            np.array([batch.num_slots]),
            np.array([sum(length**2 for length in batch.segment_lengths)]),
            np.array([sum(patches)]),
            patch_squares=np.array([sum(count**2 for count in patches)]),
            labels=np.array([batch.num_label_tokens]),
        )
        return float(found[0, 0]), float(found[0, 1])

    def position_range(self, segment: Segment) -> list[tuple[int, int]]:
        """(least, largest) position of a segment's sample, by axis; empty for a tail."""
        if not segment.length:
            return []
        end = segment.start + segment.length
        part = self.batch.position_ids[:, 0, segment.start : end]
        if not part.numel():
            return []
        return list(zip(part.amin(1).tolist(), part.amax(1).tolist(), strict=True))

    def ranks(self) -> list[int] | None:
        """For each slot, the context-parallel rank that holds it (-1: none does); None where the
        row is whole or cannot be cut."""
        if isinstance(self.slices, str) or self.rules.context == 1:
            return None
        owner = [-1] * self.num_slots
        for part in self.slices:
            for slot in part.row_index.tolist():
                if 0 <= slot < len(owner):
                    owner[slot] = part.rank
        return owner


def load_row(
    train: TrainData, encoder: Encoder, samples: Sequence[SampleRef], title: str, rules: RowRules
) -> Row:
    """Load a bin as training does, and encode its samples again, each alone.

    Args:
        train: the split.
        encoder: the split's encoder.
        samples: those of the bin.
        title: for the reader.
        rules: what the row was made by.

    Raises:
        DataError: a bad sample whose class is not skipped.
    """
    loaded = load_bin(train, samples)
    refs = refs_of(loaded, samples)
    read = read_again(train, refs)
    alone = tuple(train.dataset.encode(ref, item) for ref, item in zip(refs, read, strict=True))
    shown = take_apart(loaded, read, encoder, title)
    batch = loaded.batch
    num_rows = int(batch.input_ids.shape[0])
    if isinstance(batch, PaddedBatch):
        width = shown.num_columns
        moved = [replace(sample, start=sample.row * width) for sample in shown.samples]
        shown = replace(shown, samples=tuple(moved))
        batch = padded_as_row(batch)
    return Row(
        shown=shown,
        batch=batch,
        alone=alone,
        positions=tuple(_own_positions(encoder, item) for item in alone),
        planned=tuple(ref.key for ref in samples),
        slices=cut_row(batch, rules.context),
        rules=rules,
        num_rows=num_rows,
    )


def _own_positions(encoder: Encoder, item: EncodedSample) -> Tensor:
    """(A, s) positions of a sample, from its length and its images alone."""
    media = item.media
    places = item.media_positions.tolist()
    counts = media.num_tokens if media is not None else ()
    starts = [places[at] for at in accumulate((0, *counts[:-1]))] if counts else []
    grids = media.grid_thw if media is not None else ()
    return encoder.family.positions(len(item.input_ids), starts, grids)


def cut_row(batch: PackedBatch, size: int) -> tuple[ContextSlice, ...] | str:
    """What each of `size` context-parallel ranks holds; or why the row cannot be cut."""
    found = []
    for rank in range(size):
        try:
            part = slice_for_context(batch, rank=rank, size=size).context
        except PackingError as error:
            return str(error)
        assert part is not None
        found.append(part)
    return tuple(found)
