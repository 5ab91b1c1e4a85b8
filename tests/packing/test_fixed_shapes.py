"""Rows of one shape: a ghost segment of its own, boundaries of one size, and what reads them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from vlmpack.attention import segment_attention
from vlmpack.errors import CapabilityError, PackingError
from vlmpack.packing import (
    IGNORE_INDEX,
    EncodedSample,
    FixedShape,
    PackCollator,
    PackedBatch,
    padding_mask,
    slice_for_context,
)
from vlmpack.packing.row_layout import UnknownLengths

FIXED = FixedShape(row_tokens=24, max_sequences=3)


def sample(length: int) -> EncodedSample:
    return EncodedSample(
        key=f"s{length}",
        input_ids=torch.arange(1, length + 1),
        labels=torch.tensor([*range(2, length + 1), IGNORE_INDEX]),
        position_ids=torch.arange(length).expand(3, -1),
        media_positions=torch.empty(0, dtype=torch.int64),
    )


def row(*lengths: int, fixed: FixedShape | None = FIXED, multiple: int = 1) -> PackedBatch:
    collator = PackCollator(
        pad_token_id=0,
        num_position_axes=3,
        pad_to_multiple_of=multiple,
        total_multiple_of=multiple,
        fixed=fixed,
    )
    return collator([sample(length) for length in lengths])


@pytest.mark.parametrize("lengths", [(3, 2), (7,), (8, 8, 8), ()])
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_row_has_the_same_shapes(lengths: tuple[int, ...], multiple: int) -> None:
    batch, other = row(*lengths, multiple=multiple), row(5, 6, multiple=multiple)
    for name in ("input_ids", "labels", "loss_mask", "position_ids", "cu_seqlens"):
        assert getattr(batch, name).shape == getattr(other, name).shape, name
    assert batch.input_ids.shape == (1, 24) and batch.cu_seqlens.shape == (3 + 2,)
    assert batch.max_seqlen == batch.packed_seq_params().max_seqlen_q == 24
    assert sum(batch.segment_lengths) == 24 and len(batch.segment_lengths) == 4
    assert (batch.cu_seqlens_padded is None) == (other.cu_seqlens_padded is None) == (multiple == 1)
    if batch.cu_seqlens_padded is not None:
        assert batch.cu_seqlens_padded.shape == (5,) and batch.cu_seqlens_padded[-1] == 24
        ends = [0, *accumulate(batch.segment_lengths)]
        assert batch.cu_seqlens_padded.tolist() == ends, "a row without gaps has the same tensors"
    assert batch.num_label_tokens == sum(length - 1 for length in lengths)


def test_the_ghost_is_a_segment_of_its_own_and_the_rest_repeats_the_last_boundary() -> None:
    batch = row(3, 2, multiple=4)
    assert batch.segment_lengths == (4, 4, 16, 0)
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 21, 21]
    assert batch.cu_seqlens_padded is not None
    assert batch.cu_seqlens_padded.tolist() == [0, 4, 8, 24, 24]
    assert batch.labels[0, 8:].tolist() == [IGNORE_INDEX] * 16
    assert not batch.loss_mask[0, 8:].any() and not batch.input_ids[0, 8:].any()
    assert padding_mask(batch)[0].tolist() == [*[False] * 3, True, *[False] * 2, *[True] * 18]
    assert batch.keys == ("s3", "s2") and batch.num_tokens == 5
    free = row(3, 2, fixed=None, multiple=4)
    assert free.max_seqlen == 4 and torch.equal(batch.input_ids[:, :8], free.input_ids)
    wide = row(3, 2, fixed=FixedShape(row_tokens=24), multiple=4)
    assert wide.cu_seqlens.tolist() == [0, 3, 5, 21] and wide.max_seqlen == 24
    assert row(8, 8, 8).segment_lengths == (8, 8, 8, 0)
    assert row().segment_lengths == (24, 0, 0, 0)


def test_aligned_rows_of_free_width_repeat_no_boundaries() -> None:
    assert row(8, 4, fixed=None, multiple=4).cu_seqlens_padded is None
    assert row(8, 3, fixed=None, multiple=4).cu_seqlens_padded is not None
    assert row(fixed=None, multiple=4).cu_seqlens_padded is None


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PackingError, match=r"3 samples take 25 tokens, .* fixed to 24; .*max_tok"):
        row(8, 8, 9)
    with pytest.raises(PackingError, match=r"4 samples in a row whose cu_seqlens has room for 3"):
        row(2, 2, 2, 2)
    with pytest.raises(PackingError, match="a fixed row of 24 tokens is not a multiple of 16"):
        row(2, multiple=16)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_slices_of_a_fixed_row_hold_every_token_once(size: int) -> None:
    batch = row(7, 2, multiple=8)
    free = row(7, 2, fixed=None, multiple=8)
    slices = [slice_for_context(batch, rank=r, size=size).context for r in range(size)]
    rows = torch.cat([piece.row_index for piece in slices if piece is not None])
    assert sorted(rows.tolist()) == list(range(24))
    assert len({len(piece.row_index) for piece in slices if piece is not None}) == 1
    for rank, piece in enumerate(slices):
        expected = slice_for_context(free, rank=rank, size=size).context
        assert piece is not None and expected is not None
        real = piece.row_index[piece.row_index < 16]
        assert torch.equal(real, expected.row_index), "the ghost moved a sample's tokens"
        assert torch.equal(piece.targets, expected.targets)


def test_attention_passes_over_segments_without_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(24, heads, 8, generator=generator) for heads in (4, 2, 2))
    batch = row(3, 2, multiple=4)
    out = segment_attention(query, key, value, batch.packed_seq_params())
    for start, stop in ((0, 4), (4, 8), (8, 24)):
        alone = row(stop - start, fixed=None).packed_seq_params()
        part = slice(start, stop)
        expected = segment_attention(query[part], key[part], value[part], alone)
        torch.testing.assert_close(out[part], expected, rtol=0, atol=0)
    leaky = replace(batch, segment_lengths=(8, 0, 16, 0)).packed_seq_params()
    assert not torch.equal(segment_attention(query, key, value, leaky)[4:8], out[4:8])


def test_a_row_of_too_many_samples_keeps_its_own_shape_where_it_may() -> None:
    shape = replace(FIXED, overflows=True)
    fits, free = row(3, 2, 4, fixed=shape), row(3, 2, 4, 5, fixed=None)
    assert fits.fixed_shape and not fits.overflows and fits.num_slots == 24
    found = row(3, 2, 4, 5, fixed=shape)
    assert found.overflows and not found.fixed_shape
    assert found.cu_seqlens.tolist() == free.cu_seqlens.tolist() == [0, 3, 5, 9, 14]
    assert found.max_seqlen == free.max_seqlen == 5 and not free.overflows
    with pytest.raises(PackingError, match="room for 3"):
        row(3, 2, 4, 5, fixed=FIXED)


def test_lengths_of_captured_rows_can_be_counted_but_not_read() -> None:
    lengths = UnknownLengths(4)
    assert len(lengths) == 4
    for read in (sum, max, list, lambda each: each[0], lambda each: [*each]):
        with pytest.raises(CapabilityError, match="inside a captured graph"):
            read(lengths)
