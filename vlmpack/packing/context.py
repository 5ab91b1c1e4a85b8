"""Context parallelism: which tokens of a THD row each rank holds (zigzag, per segment).

With CP ranks every segment is cut into 2*CP equal chunks, and rank r holds chunks r and 2*CP-1-r.
One is from the front and one from the back, so causal attention costs all ranks the same.

    CP = 2, segments of 8 and 4 tokens     rank 0: 0 1 6 7 | 8 11
    0 1 2 3 4 5 6 7 | 8 9 10 11            rank 1: 2 3 4 5 | 9 10

Slicing comes after the merge of text and images, so placeholders are never counted per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from vlmpack.errors import PackingError
from vlmpack.packing.batch import ContextSlice, PackedBatch, PaddedBatch


def zigzag_index(segment_lengths: Sequence[int], *, rank: int, size: int) -> Tensor:
    """(T / size,) int64: the row's tokens that a context-parallel rank holds, in its own order.

    Args:
        segment_lengths: physical lengths, each a multiple of 2 * size where size > 1.

    Raises:
        PackingError: a segment that does not divide into 2 * size chunks.
    """
    if size == 1:
        return torch.arange(sum(segment_lengths))
    uneven = [length for length in segment_lengths if length % (2 * size)]
    if uneven:
        raise PackingError(
            f"a segment of {uneven[0]} tokens cannot be cut into 2 * CP = {2 * size} equal chunks; "
            f"pack with pad_to_multiple_of={2 * size}"
        )
    lengths = torch.tensor(segment_lengths)
    local = lengths // size  # what this rank holds of each segment
    starts = lengths.cumsum(0) - lengths
    local_starts = local.cumsum(0) - local
    segment = torch.repeat_interleave(torch.arange(len(segment_lengths)), local)
    offset = torch.arange(int(local.sum())) - local_starts[segment]
    chunk = local[segment] // 2
    front = starts[segment] + rank * chunk + offset
    back = starts[segment] + (2 * size - 1 - rank) * chunk + offset - chunk
    return torch.where(offset < chunk, front, back)


def slice_for_context(
    batch: PackedBatch,
    *,
    rank: int,
    size: int,
    all_sum: Callable[[Tensor], Tensor] | None = None,
    heads: int | None = None,
    by_row: bool = False,
) -> PackedBatch:
    """The batch with this rank's `ContextSlice`; on CPU, before it is moved.

    Args:
        batch: the whole row; its own fields stay whole.
        heads: neighbouring ranks that exchange heads, which divide `size`; None for all.
        by_row: cut the row in 2 * size chunks instead of each segment.

    Raises:
        PackingError: as `zigzag_index`.
    """
    if batch.prefix_tree is not None and size > 1:
        raise PackingError(
            "the row has shared prefixes, which context parallelism does not cut; set "
            "packing.share_prefix: false"
        )
    lengths = (batch.num_slots,) if by_row else batch.segment_lengths
    rows = [zigzag_index(lengths, rank=r, size=size) for r in range(size)]
    first = rank - rank % heads if heads else 0
    row_index = rows[rank]
    labels = batch.labels.flatten()[row_index]
    label_positions = batch.loss_mask.flatten()[row_index].nonzero().squeeze(1)
    slots = torch.full_like(batch.labels.flatten(), -1)
    slots[row_index] = torch.arange(row_index.shape[0])
    slots = slots[batch.media_positions]
    mine = (slots >= 0).nonzero().squeeze(1)
    label_places = torch.searchsorted(batch.label_positions, row_index[label_positions])
    return replace(
        batch,
        context=ContextSlice(
            rank=rank,
            size=size,
            row_index=row_index,
            natural_order=torch.cat(rows).argsort(),
            heads_order=torch.cat(rows[first : first + heads]).argsort() if heads else None,
            by_row=by_row,
            label_positions=label_positions,
            label_places=label_places,
            targets=labels[label_positions],
            media_positions=slots[mine],
            media_sources=mine if batch.media_sources is None else batch.media_sources[mine],
            all_sum=all_sum,
        ),
    )


def padding_mask(batch: PackedBatch) -> Tensor:
    """(1, T) bool on the CPU. True for slots of no sample (gaps and the tail segment)."""
    tokens = batch.segment_tokens
    real = [*tokens, *(0 for _ in batch.segment_lengths[len(tokens) :])]
    runs = [(False, True)] * len(real)
    lengths = [(n, slots - n) for n, slots in zip(real, batch.segment_lengths, strict=True)]
    return torch.repeat_interleave(
        torch.tensor(runs).flatten(), torch.tensor(lengths, dtype=torch.int64).flatten()
    )[None]


def padded_as_row(batch: PaddedBatch) -> PackedBatch:
    """Padded rows as one THD row of B segments of S slots: the same computation, one interface."""
    rows, width = batch.input_ids.shape
    offsets = torch.arange(rows + 1, dtype=torch.int32) * width
    same = {field.name: getattr(batch, field.name) for field in fields(batch)}
    flat = {name: same[name].view(1, -1) for name in ("input_ids", "labels", "loss_mask")}
    flat["position_ids"] = batch.position_ids.reshape(-1, 1, rows * width)
    return PackedBatch(
        **same | flat,
        cu_seqlens=offsets,
        cu_seqlens_padded=None,
        segment_lengths=(width,) * rows,
    )
