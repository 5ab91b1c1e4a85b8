"""A row loaded as training loads it, with what a reader sees of it beside what it is checked by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from vlmpack.build.data import build_cost_model
from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.loader import BinRequest, MicroBatch
from vlmpack.data.loading.read import SkippedSample
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder, VLMSample
from vlmpack.errors import DataError, ModelError
from vlmpack.families.placed import positions_of
from vlmpack.packing import CostModel, EncodedSample, PackedBatch
from vlmpack.packing.pairs import sequences_of
from vlmpack.proof.rows.row import Row, RowRules, cut_row
from vlmpack.proof.rows.view import RowView, SampleView, view_samples


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
    sample: SampleView | None

    @property
    def end(self) -> int:
        """The slot behind it."""
        return self.start + self.slots

    @property
    def name(self) -> str:
        """The sample's key; of what several share, the first one's and how many more."""
        if self.sample is None:
            return "tail"
        return self.sample.name if self.sample.shared_by else self.sample.key


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow(Row):
    """A row for the reader.

    Args:
        shown: the batch taken apart.
        mode: `packing.mode`.
        cost: FLOPs of the model at hand; None where its config.json leaves a size out.
    """

    shown: RowView
    mode: str
    cost: CostModel | None

    @property
    def segments(self) -> list[Segment]:
        """In row order; repeats of the last boundary, which hold nothing, are left out."""
        logical = self.flat.cu_seqlens.tolist()
        found = []
        for number, (start, end) in enumerate(pairwise(self.boundaries)):
            has_sample = number < len(self.shown.samples)
            if end <= start and not has_sample:
                continue
            found.append(
                Segment(
                    number=number,
                    start=start,
                    length=self.shown.samples[number].num_tokens if has_sample else 0,
                    slots=end - start,
                    logical=(logical[number], logical[number + 1]),
                    sample=self.shown.samples[number] if has_sample else None,
                )
            )
        return found

    def flops(self) -> tuple[float, float] | None:
        """FLOPs of a training step on this row, padding included: language model, vision tower.
        None where config.json leaves out a size that they follow from."""
        if self.cost is None:
            return None
        batch = self.flat
        grids = batch.media.grid_thw if batch.media is not None else ()
        patches = [t * h * w for t, h, w in grids]
        found = self.cost(
            np.array([batch.num_slots]),
            np.array([sum(_squares(batch))]),
            np.array([sum(patches)]),
            patch_squares=np.array([sum(count**2 for count in patches)]),
            labels=np.array([batch.num_label_tokens]),
        )
        return float(found[0, 0]), float(found[0, 1])

    def position_range(self, segment: Segment) -> list[tuple[int, int]]:
        """(least, largest) position of a segment's sample, by axis; empty for a tail."""
        end = segment.start + segment.length
        part = self.batch.position_ids.flatten(1)[:, segment.start : end]
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
    train: TrainData, encoder: Encoder, samples: Sequence[SampleRef], title: str, context: int
) -> ShownRow:
    """Load a row as training does, and encode its samples again, each alone.

    Args:
        train: the split.
        encoder: the split's encoder.
        samples: those of the row.
        title: for the reader.
        context: CP.

    Raises:
        DataError: a bad sample whose class is not skipped.
    """
    loaded, read = load_bin(train, samples)
    whole = [train.dataset.encode(*pair) for pair in zip(_refs(loaded, samples), read, strict=True)]
    alone = [part for sample in whole for part in sequences_of(sample)]
    mode = train.config.mode
    rules = RowRules(
        context=context,
        multiples=mode.multiples,
        placeholder_ids=encoder.placeholder_ids,
        pad_token_id=encoder.pad_token_id,
        budget=mode.budget if mode.facts.plans_rows else None,
    )
    return ShownRow(
        batch=loaded.batch,
        alone=tuple(alone),
        rules=rules,
        planned=tuple(ref.key for ref in samples),
        left_out=tuple(hole.key for hole in loaded.skipped),
        positions=tuple(_own_positions(encoder, item) for item in alone),
        slices=cut_row(loaded.batch, rules.context),
        sequences=2 if encoder.settings.pairs else 1,
        shown=view_row(loaded, read, encoder, title),
        mode=mode.name,
        cost=_cost_model(encoder),
    )


def _cost_model(encoder: Encoder) -> CostModel | None:
    try:
        return build_cost_model(encoder)
    except ModelError:
        return None


def load_bin(train: TrainData, samples: Sequence[SampleRef]) -> tuple[MicroBatch, list[Any]]:
    """A micro-batch as the training loader makes it, and what was read of the samples in it: a
    VLMSample each, or tokens where packs were saved.

    Raises:
        DataError: a bad sample whose class is not skipped, or that cannot be read any more.
    """
    loaded = train.dataset[BinRequest(tuple(samples))]
    if isinstance(loaded, SkippedSample):
        raise loaded.to_error()
    read = train.dataset.read(BinRequest(tuple(_refs(loaded, samples))))
    for item in read:
        if isinstance(item, DataError):
            raise item
    return loaded, list(read)


def _refs(loaded: MicroBatch, samples: Sequence[SampleRef]) -> list[SampleRef]:
    """Those samples that are in the batch, in its order."""
    refs = {(ref.shard, ref.number): ref for ref in samples}
    return [refs[name.shard, name.number] for name in loaded.samples]


def view_row(loaded: MicroBatch, read: Sequence[Any], encoder: Encoder, title: str) -> RowView:
    """What a micro-batch holds, images included.

    Args:
        loaded: the batch.
        read: what was read of its samples, in its order; see `load_bin`.
        encoder: that made it.
        title: for the reader.
    """
    samples = []
    each = 2 if encoder.settings.pairs else 1
    for view in view_samples(loaded.batch, encoder):
        place = view.sequence
        name, item = loaded.samples[place // each], read[place // each]
        is_cooked = isinstance(item, VLMSample) and not view.shared_by
        messages = item.conversations[place % each] if is_cooked else ()
        images = encoder.image_rule.pictures(view.media) if view.media is not None else ()
        samples.append(
            replace(
                view,
                shard=name.shard,
                roles=tuple(message.role for message in messages),
                images=tuple(images),
            )
        )
    rows, columns = loaded.batch.input_ids.shape
    return RowView(title, tuple(samples), loaded.skipped, rows, columns)


def _squares(batch: PackedBatch) -> Iterator[int]:
    """Squared lengths of the segments; one that goes on from others attends to these as well."""
    for number, length in enumerate(batch.segment_lengths):
        path = () if batch.forks is None else batch.forks.path(number)
        seen = sum(batch.segment_lengths[place] for place in path)
        yield length**2 + 2 * length * seen


def _own_positions(encoder: Encoder, item: EncodedSample) -> Tensor:
    """(A, s) positions of a sample, from its length and its images alone."""
    return positions_of(encoder.family, item.length, item.media_positions.tolist(), item.media)
