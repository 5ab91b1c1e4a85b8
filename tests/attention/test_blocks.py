"""Image blocks inside causal varlen, against a mask written out pair by pair."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from vlmpack.attention import BlockMasks, segment_attention, varlen
from vlmpack.attention.varlen import flash_attention, torch_varlen_attention
from vlmpack.errors import CapabilityError
from vlmpack.packing import PackedSeqParams

LENGTHS = (6, 9, 9, 9, 1, 12)
BLOCKS = ((7, 11), (16, 20), (25, 27), (27, 32), (34, 38), (38, 46))
"""In the second and third segment the same, the fourth two that touch, the last two as well."""
CPU = torch.device("cpu")


def params_of(lengths):
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedSeqParams(
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        segment_lengths=tuple(lengths),
    )


def sees(query, key, window=None):
    """Whether slot `query` sees slot `key`."""
    starts = [0, *accumulate(LENGTHS)]
    one_segment = any(a <= query < b and a <= key < b for a, b in pairwise(starts))
    one_block = any(a <= query < b and a <= key < b for a, b in BLOCKS)
    near = window is None or key > query - window
    return one_segment and near and (key <= query or one_block)


def allowed(window=None):
    slots = range(sum(LENGTHS))
    return torch.tensor([[sees(q, k, window) for k in slots] for q in slots])


def inputs(kv_heads=2, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(sum(LENGTHS), count, 8, generator=draw, dtype=dtype).requires_grad_()
        for count in (4, kv_heads, kv_heads)
    )


def attend(tensors, window=None, blocks=BLOCKS):
    masks = BlockMasks(LENGTHS, blocks, CPU)
    return segment_attention(*tensors, params_of(LENGTHS), window=window, masks=masks)


@pytest.mark.parametrize("window", [None, 3, 1, 40], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_one_mask_over_the_whole_row(window, kv_heads):
    tensors = inputs(kv_heads)
    ours = attend(tensors, window)
    query, key, value = tensors
    key, value = (part.repeat_interleave(4 // kv_heads, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / 8**0.5
    weights = scores.masked_fill(~allowed(window), -torch.inf).softmax(dim=-1)
    theirs = torch.einsum("hqk,khd->qhd", weights, value)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)
    ours, theirs = (torch.autograd.grad(out.square().sum(), tensors) for out in (ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-12)
    causal = attend(tensors, window, blocks=())
    assert (causal - attend(tensors, window)).abs().max() > 0.1


def test_who_sees_whom():
    """By gradients: exactly the pairs that the mask lets through, touching blocks kept apart."""
    tensors = inputs()
    output = attend(tensors)
    for slot in range(sum(LENGTHS)):
        (gradient,) = torch.autograd.grad(output[slot].sum(), tensors[2], retain_graph=True)
        reached = gradient.flatten(1).any(dim=1)
        assert torch.equal(reached, allowed()[slot]), slot
    assert sees(7, 10) and sees(25, 26) and not sees(25, 27), "an image's first token, its last"


def test_masks_are_made_once_and_only_where_one_is_needed(monkeypatch):
    calls = []
    original = varlen.scaled_dot_product_attention

    def spy(query, *args, attn_mask, is_causal, **kwargs):
        calls.append((tuple(query.shape[::2]), attn_mask, is_causal))
        return original(query, *args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(varlen, "scaled_dot_product_attention", spy)
    masks = BlockMasks(LENGTHS, BLOCKS, CPU)
    tensors, params = inputs(), params_of(LENGTHS)
    for _ in range(2):
        segment_attention(*tensors, params, masks=masks)
        segment_attention(*tensors, params, window=8, masks=masks)
    full, sliding, *again = (calls[start : start + 5] for start in range(0, 20, 5))
    # The second and third segment are alike and share a call.
    assert [shape for shape, _, _ in full] == [(1, 6), (2, 9), (1, 9), (1, 1), (1, 12)]
    assert [causal for _, _, causal in full] == [True, False, False, True, False]
    assert [causal for _, _, causal in sliding] == [True, False, False, True, False]
    for first, second in zip([*full, *sliding], [*again[0], *again[1]], strict=True):
        assert first[1] is second[1], "made anew in the second layer"
    assert full[1][1] is not sliding[1][1]


@pytest.mark.parametrize(
    "blocks", [((4, 8),), ((0, 3), (14, 16)), ((44, 47),), ((46, 48),)], ids=str
)
def test_a_block_outside_of_its_segment_is_refused(blocks):
    with pytest.raises(ValueError, match="an image's tokens"):
        BlockMasks(LENGTHS, blocks, CPU)


def test_masks_go_with_their_own_segments_and_causal_attention():
    masks = BlockMasks(LENGTHS, BLOCKS, CPU)
    other = params_of((sum(LENGTHS),))
    with pytest.raises(ValueError, match="over the same segments"):
        segment_attention(*inputs(), other, masks=masks)
    with pytest.raises(ValueError, match="over the same segments"):
        segment_attention(*inputs(), params_of(LENGTHS), causal=False, masks=masks)


@pytest.mark.parametrize("kernel", [torch_varlen_attention, flash_attention])
def test_the_cuda_kernels_refuse_masks_before_anything_else(kernel):
    masks = BlockMasks(LENGTHS, BLOCKS, CPU)
    with pytest.raises(CapabilityError, match="segments has one"):
        kernel(*inputs(), params_of(LENGTHS), masks=masks)


@pytest.mark.parametrize("window", [None, 3], ids=str)
def test_masks_of_padded_rows(window):
    blocks = ((1, 4), (13, 17))
    masks = BlockMasks((6, 6, 6), blocks, CPU).rows(window)
    assert masks.shape == (3, 1, 6, 6)
    for row, inside in enumerate(((1, 4), None, (1, 5))):
        for query in range(6):
            for key in range(6):
                together = inside and all(inside[0] <= at < inside[1] for at in (query, key))
                expected = key <= query or bool(together)
                # The row without an image is causal; its window is that of the others.
                expected &= window is None or key > query - window
                assert bool(masks[row, 0, query, key]) == expected
    assert BlockMasks((6, 6), (), CPU).rows(None) is None


def test_blocks_that_only_windows_have():
    """A layer without a window is causal throughout, one with a window as if nothing were said."""
    tensors = inputs()
    masks = BlockMasks(LENGTHS, BLOCKS, CPU, in_windows_alone=True)
    whole = segment_attention(*tensors, params_of(LENGTHS), masks=masks)
    assert torch.equal(whole, attend(tensors, blocks=()))
    assert not torch.allclose(whole, attend(tensors))
    for window in (3, 40):  # the second reaches over every segment
        inside = segment_attention(*tensors, params_of(LENGTHS), window=window, masks=masks)
        assert torch.equal(inside, attend(tensors, window=window))
        assert not torch.allclose(inside, attend(tensors, window=window, blocks=()))
