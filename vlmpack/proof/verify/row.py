"""The tensors of a row against the samples' own: no model is needed to see these differences.

layout     where each sample must lie, from its length and the alignment alone
boundaries, labels, loss mask, pixels     compared with the samples
positions  compared with what the transformers class computes for each sample alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vlmpack.alignment import round_up
from vlmpack.data.protocols import Collator
from vlmpack.packing import (
    IGNORE_INDEX,
    Batch,
    EncodedSample,
    PackedBatch,
    PaddedBatch,
)
from vlmpack.proof.verify.figures import Check

LAYOUT = "boundaries"
LABELS = "labels and loss mask"
POSITIONS = "positions"
PIXELS = "pixels in order"


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch and the samples that must be in it.

    Args:
        samples: in row order.
        numbers: of the samples, over all rows.
        batch: what the collator made of them.
        starts: the flat slot at which each sample must begin, not taken from the batch.
        ends: the flat slot behind each sample's padding.
    """

    samples: tuple[EncodedSample, ...]
    numbers: tuple[int, ...]
    batch: Batch
    starts: tuple[int, ...]
    ends: tuple[int, ...]


def make_row(collator: Collator, samples: Sequence[EncodedSample], numbers: Sequence[int]) -> Row:
    """The samples as one micro-batch."""
    batch = collator(samples)
    lengths = [sample.length for sample in samples]
    if isinstance(batch, PaddedBatch):
        width = round_up(max(lengths), collator.pad_to_multiple_of)
        slots = [width] * len(lengths)
    else:
        slots = [round_up(length, collator.pad_to_multiple_of) for length in lengths]
    ends = tuple(accumulate(slots))
    return Row(tuple(samples), tuple(numbers), batch, (0, *ends[:-1]), ends)


def group_samples(
    samples: Sequence[EncodedSample],
    count: int,
    collator: Collator,
    *,
    max_tokens: int | None,
) -> list[list[int]]:
    """Which samples share a row: at most `count` of them, and what the row has room for.

    Args:
        samples: by number.
        count: samples of a row.
        collator: that makes the rows.
        max_tokens: of a row; None for no bound. A longer sample has a row of its own.
    """
    if collator.fixed is not None and isinstance(collator.fixed.max_sequences, int):
        count = min(count, collator.fixed.max_sequences)
    groups: list[list[int]] = [[]]
    filled = 0
    for number, sample in enumerate(samples):
        slots = round_up(sample.length, collator.pad_to_multiple_of)
        over = max_tokens is not None and filled + slots > max_tokens
        if groups[-1] and (over or len(groups[-1]) == count):
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += slots
    return groups


def _flat(values: Tensor, axes: bool = False) -> Tensor:
    """(..., rows, slots) -> (..., rows * slots)."""
    return values.flatten(1) if axes else values.flatten()


def check_boundaries(rows: Sequence[Row]) -> Check:
    """Each sample's tokens lie where its length says, and the boundaries enclose exactly them."""
    for row in rows:
        ids = _flat(row.batch.input_ids)
        for sample, start in zip(row.samples, row.starts, strict=True):
            if not torch.equal(ids[start : start + sample.length], sample.input_ids):
                return _broken(
                    LAYOUT,
                    f"{sample.key}: slots {start} to {start + sample.length - 1} do not hold its "
                    f"tokens",
                    "the collator (vlmpack/packing/collate.py)",
                )
        problem = _segments(row) if isinstance(row.batch, PackedBatch) else ""
        if problem:
            return _broken(LAYOUT, problem, "cu_seqlens and segment_lengths of the row")
    count = sum(len(row.samples) for row in rows)
    packed = isinstance(rows[0].batch, PackedBatch)
    what = "cu_seqlens are the lengths of" if packed else "a padded row each for"
    return Check(name=LAYOUT, status="pass", detail=f"{what} all {count} samples")


def _segments(row: Row) -> str:
    """What is wrong with the boundaries of a packed row, in the form that attention takes."""
    batch = row.batch
    assert isinstance(batch, PackedBatch)
    params = batch.packed_seq_params()
    count = len(row.samples)
    lengths = tuple(sample.length for sample in row.samples)
    slots = tuple(end - start for start, end in zip(row.starts, row.ends, strict=True))
    logical = tuple(params.cu_seqlens_q.diff().tolist())
    physical = tuple(params.cu_seqlens_physical.diff().tolist())
    if batch.lengths != lengths:
        return f"the row says lengths {batch.lengths}, the samples have {lengths}"
    if logical[:count] != lengths:
        return f"cu_seqlens has segments of {logical[:6]}, expected {lengths[:6]}"
    if physical[:count] != slots or params.segment_lengths[:count] != slots:
        return f"physical segments of {physical[:6]}, expected {slots[:6]}"
    if sum(physical) != batch.num_slots:
        return f"the boundaries end at {sum(physical)}, the row has {batch.num_slots} slots"
    if params.max_seqlen_q < max(physical):
        return f"max_seqlen is {params.max_seqlen_q}, a segment has {max(physical)} slots"
    return ""


def check_labels(rows: Sequence[Row]) -> Check:
    """Each label is the next token of its own sample; nothing else carries loss."""
    count = 0
    for row in rows:
        batch = row.batch
        labels, mask = _flat(batch.labels), _flat(batch.loss_mask)
        expected = torch.full_like(labels, IGNORE_INDEX)
        for sample, start in zip(row.samples, row.starts, strict=True):
            at = (sample.labels != IGNORE_INDEX).nonzero()[:, 0]
            if bool((at + 1 >= sample.length).any()):
                return _broken(LABELS, f"{sample.key}: its last token has a label", "the encoder")
            if not torch.equal(sample.labels[at], sample.input_ids[at + 1]):
                return _broken(
                    LABELS, f"{sample.key}: a label is not its next token", "the encoder"
                )
            expected[start + at] = sample.input_ids[at + 1]
            count += len(at)
        if not torch.equal(labels, expected):
            slot = int((labels != expected).nonzero()[0])
            return _broken(
                LABELS,
                f"slot {slot}{_of(row, slot)} learns {int(labels[slot])}, expected "
                f"{int(expected[slot])}",
                "labels must be shifted inside each sample, before packing",
            )
        if not torch.equal(mask, labels != IGNORE_INDEX):
            return _broken(LABELS, "loss_mask is not (labels != -100)", "the collator")
        if not torch.equal(batch.label_positions, mask.nonzero()[:, 0]):
            return _broken(LABELS, "label_positions are not the slots of loss_mask", "the collator")
    return Check(
        name=LABELS,
        status="pass",
        detail=f"{count:,} labels, each the next token of its own sample",
    )


def _of(row: Row, slot: int) -> str:
    """The sample that a slot belongs to, for the reader."""
    for sample, start, end in zip(row.samples, row.starts, row.ends, strict=True):
        if start <= slot < end:
            return f" of {sample.key}"
    return " of no sample"


def check_positions(rows: Sequence[Row], own: Sequence[Tensor], source: str) -> Check:
    """The row's positions are those that each sample has alone.

    Args:
        rows: the micro-batches.
        own: (A, s) positions of every sample by number, as the transformers class counts them.
        source: who counted them.
    """
    for row in rows:
        positions = _flat(row.batch.position_ids, axes=True)
        for sample, number, start in zip(row.samples, row.numbers, row.starts, strict=True):
            found, wanted = positions[:, start : start + sample.length], own[number]
            if found.shape != wanted.shape:
                return _broken(
                    POSITIONS,
                    f"{sample.key}: shape {tuple(found.shape)}, {source} gives "
                    f"{tuple(wanted.shape)}",
                    "the family's positions",
                )
            if not torch.equal(found, wanted):
                axis, slot = (found != wanted).nonzero()[0].tolist()
                return _broken(
                    POSITIONS,
                    f"token {slot} of {sample.key}: {int(found[axis, slot])} on axis {axis}, "
                    f"{source} gives {int(wanted[axis, slot])}",
                    "positions must be counted for each sample alone, not over the row",
                )
    axes = own[0].shape[0]
    return Check(
        name=POSITIONS,
        status="pass",
        detail=f"{axes} axis, equal to {source}"
        if axes == 1
        else f"{axes} axes, equal to {source}",
    )


def check_pixels(rows: Sequence[Row], placeholder_id: int) -> Check | None:
    """The row's pixels are the samples' own, in their order, and fill their placeholders.

    Returns:
        None where no sample has an image.
    """
    count = 0
    for row in rows:
        own = [(s.key, s.media) for s in row.samples if s.media is not None]
        media = row.batch.media
        if (media is None) != (not own):
            return _broken(PIXELS, f"{len(own)} samples with images, the row has none", "collator")
        if media is None:
            continue
        places = (_flat(row.batch.input_ids) == placeholder_id).nonzero()[:, 0]
        if not torch.equal(places, row.batch.media_positions):
            return _broken(PIXELS, "media_positions are not the placeholders' slots", "collator")
        start = image = 0
        for key, theirs in own:
            stop = start + theirs.pixel_values.shape[0]
            after = image + theirs.num_images
            if (
                not torch.equal(media.pixel_values[start:stop], theirs.pixel_values)
                or media.grid_thw[image:after] != theirs.grid_thw
                or media.num_tokens[image:after] != theirs.num_tokens
            ):
                return _broken(
                    PIXELS,
                    f"{key}: the row's patches {start} to {stop - 1} are not its own",
                    "the order in which the collator concatenates images",
                )
            start, image = stop, after
        if start != media.pixel_values.shape[0] or image != media.num_images:
            return _broken(PIXELS, "the row has more patches than its samples", "the collator")
        count += image
    if not count:
        return None
    return Check(name=PIXELS, status="pass", detail=f"{count} images, bit by bit")


def _broken(name: str, detail: str, look_at: str) -> Check:
    return Check(name=name, status="fail", detail=detail, look_at=look_at)
