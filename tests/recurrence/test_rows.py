"""Where slots lie in their segments, from boundaries alone; what is derived is made once."""

from __future__ import annotations

import pytest
import torch
from support.recurrences import segments

from vlmpack.packing import PackedSeqParams
from vlmpack.recurrence import RowSegments


def test_each_slot_knows_its_segment_and_its_place_in_it():
    row = segments((2, 0, 3, 1, 0, 0))
    assert row.seq_idx.tolist() == [[0, 0, 2, 2, 2, 3]]
    assert row.offsets.tolist() == [0, 1, 0, 1, 2, 0]
    assert row.seq_idx.dtype is torch.int32
    assert row.cu_seqlens_host.equal(row.cu_seqlens)


def test_alignment_gaps_belong_to_the_segment_before_them():
    logical = torch.tensor([0, 3, 5], dtype=torch.int32)
    physical = torch.tensor([0, 4, 8], dtype=torch.int32)
    params = PackedSeqParams(
        cu_seqlens_q=logical,
        cu_seqlens_kv=logical,
        cu_seqlens_q_padded=physical,
        cu_seqlens_kv_padded=physical,
        max_seqlen_q=4,
        max_seqlen_kv=4,
        segment_lengths=(4, 4),
    )
    row = RowSegments.of(params)
    assert row.offsets.tolist() == [0, 1, 2, 3] * 2
    assert row.lengths == (4, 4)


def test_what_is_derived_is_made_once():
    row = segments((5, 4))
    assert row.seq_idx is row.seq_idx
    assert row.offsets is row.offsets
    assert row.once("a", lambda: 1) == 1
    assert row.once("a", lambda: 2) == 1


def test_boundaries_of_another_number_of_segments_are_refused():
    with pytest.raises(ValueError, match=r"2 segments have 3 boundaries.*\(4,\)"):
        RowSegments((2, 3), torch.tensor([0, 2, 3, 5], dtype=torch.int32))


def test_a_tensor_of_another_row_is_refused():
    with pytest.raises(ValueError, match="sum to 5 slots, the tensor has 6"):
        segments((2, 3)).check(6)
