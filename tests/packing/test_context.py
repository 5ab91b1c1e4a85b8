"""Zigzag slices of THD rows against a loop over segments, and padded rows as THD rows."""

from __future__ import annotations

import random

import pytest
import torch
from support.samples import image_sample, text_sample

from vlmpack.errors import PackingError
from vlmpack.packing import (
    IGNORE_INDEX,
    PackCollator,
    pack_batch_sequences,
    pad_batch_sequences,
    padded_as_row,
    padding_mask,
    slice_for_context,
)
from vlmpack.packing.context import zigzag_index

SIZES = (1, 2, 4, 8)


def naive_zigzag(segment_lengths, rank, size):
    """Chunks r and 2 * CP - 1 - r of every segment, one after the other."""
    index, start = [], 0
    for length in segment_lengths:
        tokens = list(range(start, start + length))
        if size == 1:
            index += tokens
        else:
            chunk = length // (2 * size)
            for which in (rank, 2 * size - 1 - rank):
                index += tokens[which * chunk : (which + 1) * chunk]
        start += length
    return index


@pytest.mark.parametrize("size", SIZES)
def test_against_a_loop_over_segments(size):
    draw = random.Random(size)
    for _ in range(30):
        lengths = [2 * size * draw.randint(0, 5) for _ in range(draw.randint(1, 6))]
        for rank in range(size):
            index = zigzag_index(lengths, rank=rank, size=size)
            assert index.dtype == torch.int64
            assert index.tolist() == naive_zigzag(lengths, rank, size)


def test_the_picture_of_the_docstring():
    assert zigzag_index([8, 4], rank=0, size=2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_index([8, 4], rank=1, size=2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("size", SIZES[1:])
def test_each_rank_owns_the_chunks_that_transformer_engine_documents(size):
    """Chunks r and 2 * CP - 1 - r: also what Megatron gives each rank of a single sequence."""
    chunk = 3
    row = torch.arange(2 * size * chunk).view(2 * size, chunk)
    for rank in range(size):
        owned = row.index_select(0, torch.tensor([rank, 2 * size - 1 - rank]))
        index = zigzag_index([row.numel()], rank=rank, size=size)
        assert torch.equal(index, owned.flatten())


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_rank_has_the_same_causal_work(size):
    lengths = [2 * size * n for n in (1, 4, 3)]
    offsets = torch.cat([torch.arange(length) for length in lengths])
    work = {int((offsets[zigzag_index(lengths, rank=r, size=size)] + 1).sum()) for r in range(size)}
    assert len(work) == 1


def test_a_segment_that_does_not_divide_is_an_error_with_the_knob():
    with pytest.raises(PackingError, match=r"segment of 6 tokens .* 2 \* CP = 4 .*_of=4"):
        zigzag_index([8, 6], rank=0, size=2)


def bin_of(size, *, total=1):
    """An image, text, three tokens and one token; a tail segment where `total` asks for one."""
    samples = [
        image_sample("image", num_text=9),
        text_sample("text", range(30, 47), axes=3, num_targets=11),
        text_sample("three", [5, 6, 7], axes=3, num_targets=2),
        text_sample("one", [8], axes=3),
    ]
    multiple = 2 * size if size > 1 else 1
    return pack_batch_sequences(
        samples,
        pad_to_multiple_of=multiple,
        total_multiple_of=total * multiple,
        pad_token_id=0,
    )


@pytest.mark.parametrize("total", [1, 64])
@pytest.mark.parametrize("size", SIZES)
def test_slices_reassemble_the_row(size, total):
    row = bin_of(size, total=total)
    assert (len(row.segment_lengths) > len(row.keys)) == (total > 1), "the tail segment"
    ids, slices = row.input_ids.flatten(), []
    for rank in range(size):
        batch = slice_for_context(row, rank=rank, size=size)
        own = batch.context
        assert (own.rank, own.size) == (rank, size)
        assert own.row_index.shape == (row.num_slots // size,)
        slices.append(ids[own.row_index])
        assert torch.equal(
            own.natural_order, slice_for_context(row, rank=0, size=size).context.natural_order
        )
        for field in ("input_ids", "labels", "media_positions", "label_positions", "keys"):
            assert getattr(batch, field) is getattr(row, field), "the row itself stays whole"
    natural = own.natural_order
    assert torch.equal(torch.cat(slices)[natural], ids)
    assert torch.equal(natural.sort().values, torch.arange(row.num_slots))


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("size", "heads"), [(4, 2), (4, 1), (8, 4)])
def test_neighbours_together_hold_the_chunks_of_one_place(size, heads, by_row):
    """Those that exchange heads have what one rank of a smaller ring has, in the row's order."""
    row = bin_of(size)
    lengths = (row.num_slots,) if by_row else row.segment_lengths
    for first in range(0, size, heads):
        ranks = range(first, first + heads)
        parts = [
            slice_for_context(row, rank=rank, size=size, heads=heads, by_row=by_row).context
            for rank in ranks
        ]
        held = torch.cat([part.row_index for part in parts])
        place = zigzag_index(lengths, rank=first // heads, size=size // heads)
        for part in parts:
            assert torch.equal(held[part.heads_order], place)
            assert part.by_row is by_row


@pytest.mark.parametrize("size", SIZES)
def test_every_label_is_learned_once_from_its_own_token(size):
    """Labels shifted inside the sample, before the slice: (token, label) pairs survive it."""
    row = bin_of(size)
    labels = row.labels.flatten()
    pairs = []
    for rank in range(size):
        own = slice_for_context(row, rank=rank, size=size).context
        at = own.row_index[own.label_positions]
        assert torch.equal(labels[at], own.targets)
        assert (own.targets != IGNORE_INDEX).all()
        pairs += list(zip(at.tolist(), own.targets.tolist(), strict=True))
    expected = [(i, int(labels[i])) for i in row.label_positions.tolist()]
    assert sorted(pairs) == expected


def test_a_sample_shorter_than_its_chunks_leaves_ranks_without_labels():
    row = pack_batch_sequences(
        [text_sample("three", [5, 6, 7], num_targets=2)], pad_to_multiple_of=8, pad_token_id=0
    )
    found = [slice_for_context(row, rank=rank, size=4).context for rank in range(4)]
    assert [own.row_index.tolist() for own in found] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [own.targets.tolist() for own in found] == [[6], [7], [], []]
    assert all(own.label_positions.dtype == torch.int64 for own in found)


def test_a_row_packed_for_another_cp_is_refused():
    with pytest.raises(PackingError, match="pad_to_multiple_of=8"):
        slice_for_context(bin_of(2), rank=0, size=4)


def test_padded_rows_as_one_row():
    samples = [image_sample("image", num_text=5), text_sample("text", [5, 6, 7], axes=3)]
    padded = pad_batch_sequences(samples, pad_token_id=0)
    row = padded_as_row(padded)
    rows, width = padded.input_ids.shape
    assert row.input_ids.shape == row.labels.shape == row.loss_mask.shape == (1, rows * width)
    assert torch.equal(row.input_ids.view(rows, width), padded.input_ids)
    assert torch.equal(row.labels.view(rows, width), padded.labels)
    assert row.position_ids.shape == (3, 1, rows * width)
    assert torch.equal(row.position_ids.view(3, rows, width), padded.position_ids)
    assert row.segment_lengths == (width,) * rows
    assert row.cu_seqlens.tolist() == [0, width, 2 * width]
    assert row.cu_seqlens.dtype == torch.int32
    assert row.cu_seqlens_padded is None
    assert torch.equal(row.loss_mask, row.labels != IGNORE_INDEX)
    assert torch.equal(row.label_positions, row.loss_mask.flatten().nonzero().squeeze(1))
    for field in ("media", "media_positions", "keys", "lengths"):
        assert getattr(row, field) is getattr(padded, field)
    assert (row.num_tokens, row.num_slots, row.num_padded_slots) == (
        padded.num_tokens,
        padded.num_slots,
        padded.num_padded_slots,
    )


def test_padding_is_what_belongs_to_no_sample():
    row = bin_of(2, total=16)
    assert row.segment_lengths == (16, 20, 4, 4, 20)
    mask = padding_mask(row)
    assert mask.dtype == torch.bool
    assert mask.shape == row.input_ids.shape
    expected, start = torch.ones(row.num_slots, dtype=torch.bool), 0
    for length, slots in zip(row.lengths, row.segment_lengths, strict=False):
        expected[start : start + length] = False
        start += slots
    assert start < row.num_slots, "the tail segment"
    assert torch.equal(mask[0], expected)
    assert int((~mask).sum()) == row.num_tokens


def test_a_row_without_gaps_has_no_padding():
    full = pack_batch_sequences([text_sample("four", [1, 2, 3, 4])], pad_token_id=0)
    assert not padding_mask(full).any()


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_empty_row_is_padding(multiple):
    empty = PackCollator(pad_token_id=0, num_position_axes=3, pad_to_multiple_of=multiple).empty()
    mask = padding_mask(empty)
    assert mask.shape == empty.input_ids.shape
    assert mask.numel() > 0
    assert mask.all()


def test_padding_of_padded_rows():
    samples = [image_sample("image", num_text=5), text_sample("text", [5, 6, 7], axes=3)]
    padded = pad_batch_sequences(samples, pad_token_id=0)
    rows, width = padded.input_ids.shape
    mask = padding_mask(padded_as_row(padded)).view(rows, width)
    assert [int(row.sum()) for row in ~mask] == [sample.length for sample in samples]
    assert all(not row[: sample.length].any() for row, sample in zip(mask, samples, strict=True))
    assert mask[1, 3:].all()
