"""Attention by the boundaries' tensor equals the loop over segments."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.varlen import boundary_attention, segment_attention
from vlmpack.packing import PackedSeqParams
from vlmpack.packing.row_layout import UnknownLengths

LENGTHS = ((7, 1, 12, 4), (24,), (5, 5, 14, 0, 0))


def _params(lengths, *, read=True):
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    width = sum(lengths)
    return PackedSeqParams(
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=width,
        max_seqlen_kv=width,
        segment_lengths=lengths if read else UnknownLengths(len(lengths)),
    )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None), (False, 3)])
def test_it_is_the_segment_loop(lengths, causal, window):
    torch.manual_seed(0)
    query = torch.randn(24, 4, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(24, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"causal": causal, "window": window, "scale": 0.3}
    found = boundary_attention(query, key, value, _params(lengths, read=False), **options)
    wanted = segment_attention(query, key, value, _params(lengths), **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(found.square().sum(), (query, key, value))
    theirs = torch.autograd.grad(wanted.square().sum(), (query, key, value))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    # the control: other boundaries are seen
    moved = boundary_attention(query, key, value, _params((9, *lengths[1:-1], 24)), **options)
    assert not torch.allclose(moved, wanted)


def test_image_blocks_are_refused():
    x = torch.randn(24, 2, 8)
    masks = BlockMasks((24,), ((2, 5),), x.device)
    with pytest.raises(ValueError, match="image blocks"):
        boundary_attention(x, x, x, _params((24,)), masks=masks)
