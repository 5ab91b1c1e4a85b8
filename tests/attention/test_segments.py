"""Per-segment attention against a plain block-diagonal mask, and its isolation bit for bit."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate

import pytest
import torch

from vlmpack.attention import segment_attention
from vlmpack.packing import PackedSeqParams

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}
"""Largest absolute error of unit-variance inputs: some ten roundings of each dtype."""

LAYOUTS = {
    "one": (7,),
    "equal": (16,) * 6,
    "unequal": (3, 17, 1, 8, 30, 2),
    "runs": (4, 4, 4, 9, 9, 1, 1, 4),
    "ones": (1,) * 9,
    "empty segments": (0, 5, 0, 0, 6, 6, 0),
}


def params_of(lengths, padded=None):
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    physical = lengths if padded is None else padded
    cu_padded = None
    if padded is not None:
        cu_padded = torch.tensor([0, *accumulate(padded)], dtype=torch.int32)
    return PackedSeqParams(
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=max(physical),
        max_seqlen_kv=max(physical),
        segment_lengths=tuple(physical),
    )


def inputs(total, heads=4, kv_heads=4, width=8, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(total, count, width, generator=draw).to(dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )


def plain(query, key, value, lengths, *, causal=True, scale=None, window=None):
    """softmax(q k^T + mask) v with one T x T mask, in float64."""
    query, key, value = (part.double() for part in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = torch.arange(query.shape[0])
    distance = index[:, None] - index[None, :]
    allowed = segment[:, None] == segment[None, :]
    if causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance.abs() < window
    scores = torch.einsum("qhd,khd->hqk", query, key)
    scores = scores * (scale if scale is not None else 1 / math.sqrt(query.shape[2]))
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.cases(quick=0.1, slow="*")
@pytest.mark.parametrize("window", [None, 1, 4, 100], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=lambda n: f"kv-{n}")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_block_diagonal_mask(layout, kv_heads, causal, window):
    lengths = LAYOUTS[layout]
    tensors = inputs(sum(lengths), kv_heads=kv_heads)
    ours = segment_attention(*tensors, params_of(lengths), causal=causal, window=window)
    theirs = plain(*tensors, lengths, causal=causal, window=window)
    assert (ours - theirs).abs().max() < TOLERANCE[torch.float32]

    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    our_gradients = torch.autograd.grad((ours * weights).sum(), tensors)
    their_gradients = torch.autograd.grad((theirs * weights).sum(), tensors)
    for ours, theirs in zip(our_gradients, their_gradients, strict=True):
        assert (ours - theirs).abs().max() < 10 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtype_and_scale_are_kept(dtype):
    lengths = LAYOUTS["unequal"]
    tensors = inputs(sum(lengths), kv_heads=2, dtype=dtype)
    ours = segment_attention(*tensors, params_of(lengths), scale=0.3)
    assert ours.dtype == dtype
    assert ours.shape == tensors[0].shape
    error = (ours.double() - plain(*tensors, lengths, scale=0.3)).abs().max()
    assert error < TOLERANCE[dtype]
    unscaled = segment_attention(*tensors, params_of(lengths))
    assert (unscaled - ours).abs().max() > 0.1, "the scale had no effect"


@pytest.mark.parametrize("window", [None, 5])
def test_other_segments_never_reach_a_segment(window):
    """Bit-equal output and gradients whatever the other segments hold, NaN included."""
    lengths = LAYOUTS["unequal"]
    params = params_of(lengths)
    starts = [0, *accumulate(lengths)]
    tensors = inputs(sum(lengths), kv_heads=2)
    before = segment_attention(*tensors, params, window=window)
    gradients = torch.autograd.grad(before.square().sum(), tensors)
    for index, length in enumerate(lengths):
        here = slice(starts[index], starts[index] + length)
        poisoned = []
        for part in tensors:
            copy = torch.full_like(part, float("nan"))
            copy[here] = part.detach()[here]
            poisoned.append(copy.requires_grad_())
        after = segment_attention(*poisoned, params, window=window)
        assert torch.equal(after[here], before[here])
        after_gradients = torch.autograd.grad(after[here].square().sum(), poisoned)
        for now, then in zip(after_gradients, gradients, strict=True):
            assert torch.equal(now[here], then[here])


def test_alignment_gaps_are_a_harmless_tail_for_causal_attention():
    logical, physical = (3, 5, 8), (4, 8, 8)
    params = params_of(logical, physical)
    tensors = inputs(20, kv_heads=2)
    ours = segment_attention(*tensors, params)
    real = torch.cat([torch.arange(n) + s for n, s in zip(logical, (0, 4, 12), strict=True)])
    theirs = plain(*(part[real] for part in tensors), logical)
    assert (ours[real] - theirs).abs().max() < TOLERANCE[torch.float32]


def test_bidirectional_attention_refuses_alignment_gaps():
    with pytest.raises(ValueError, match="without alignment gaps"):
        segment_attention(*inputs(20), params_of((3, 5, 8), (4, 8, 8)), causal=False)


def test_equal_segments_share_one_kernel_call(monkeypatch):
    calls = []
    from vlmpack.attention import varlen

    original = varlen.scaled_dot_product_attention

    def counted(query, *args, **kwargs):
        calls.append(tuple(query.shape[::2]))
        return original(query, *args, **kwargs)

    monkeypatch.setattr(varlen, "scaled_dot_product_attention", counted)
    segment_attention(*inputs(sum(LAYOUTS["runs"])), params_of(LAYOUTS["runs"]))
    assert calls == [(3, 4), (2, 9), (2, 1), (1, 4)]


def sliced(query, key, value, lengths, *, window=None):
    """The same calls on slices of the row, one segment after the other."""
    outputs = []
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        q, k, v = (part[stop - length : stop].transpose(0, 1)[None] for part in (query, key, value))
        band = None
        if window is not None and window < length:
            band = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, enable_gqa=band is None
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def nodes_behind(output):
    """How often each operation occurs in the graph of a tensor's gradient."""
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return Counter(node.name() for node in seen)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_gradients_are_those_of_slices_bit_for_bit(window, dtype):
    lengths = (3, 17, 1, 8, 30, 2, 64, 5)
    tensors = inputs(sum(lengths), kv_heads=2, dtype=dtype)
    ours = segment_attention(*tensors, params_of(lengths), window=window)
    theirs = sliced(*tensors, lengths, window=window)
    assert torch.equal(ours, theirs)
    for own, other in zip(
        torch.autograd.grad(ours.square().sum(), tensors),
        torch.autograd.grad(theirs.square().sum(), tensors),
        strict=True,
    ):
        assert torch.equal(own, other)
        assert own.count_nonzero() > 0


def test_no_segment_fills_a_whole_row_in_the_backward_pass():
    """A slice's gradient is a row of zeros with the slice in it; a split's are joined."""
    lengths = tuple(range(1, 65))
    tensors = inputs(sum(lengths), kv_heads=2)
    nodes = nodes_behind(segment_attention(*tensors, params_of(lengths)))
    assert not [name for name in nodes if "Slice" in name or "Select" in name or "Narrow" in name]
    assert nodes["SplitWithSizesBackward0"] == 3, "once for queries, keys and values"
    by_slices = nodes_behind(sliced(*tensors, lengths))
    assert by_slices["SliceBackward0"] == 3 * len(lengths), "what is counted"
