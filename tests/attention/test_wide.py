"""Attention of wide heads: our Triton kernels, run by Triton's interpreter on a CPU, against
attention of each sample in float64. `make kernels` installs Triton."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from attention.test_prefix_calls import with_forks
from attention.test_segments import params_of
from support.interpreted import Interpreter, why_not_installed
from support.recurrences import worst

from vlmpack.attention import (
    AttentionChoice,
    BlockMasks,
    prefix_attention,
    segment_attention,
    varlen,
)
from vlmpack.attention.prefix_attention import PrefixAttention, PrefixRow
from vlmpack.attention.wide import OPERATORS, wide_attention
from vlmpack.packing.prefix_tree import PrefixTree

MISSING = why_not_installed()


def interpreted(test):
    """Triton runs it."""
    return pytest.mark.slow(pytest.mark.skipif(MISSING is not None, reason=str(MISSING))(test))


LOW, HALF, HIGH = torch.bfloat16, torch.float16, torch.float32
BOUND = {HIGH: 3e-6, HALF: 2e-3, LOW: 1.5e-2}
"""Relative to the largest entry. Weights and their gradients are rounded to the narrow dtype before
they are multiplied, as in FlashAttention, and the results once more."""


@pytest.fixture(scope="module")
def interpreter():
    process = Interpreter("wide")
    yield process
    process.close()


def boundaries(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def drawn(lengths, heads, width, dtype=HIGH):
    """Queries, keys, values and the output's gradient: (T, H, D) each."""
    draw = torch.Generator().manual_seed(0)
    counts = (heads[0], heads[1], heads[1], heads[0])
    made = [torch.randn(sum(lengths), n, width, generator=draw).to(dtype) for n in counts]
    return made[:3], made[3]


def of_samples(tensors, lengths, scale, grad, *, mixes=False):
    """Output and gradients in float64, sample by sample; with `mixes` as if there were one."""
    leaves = [x.double().requires_grad_() for x in tensors]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    outs = []
    for start, stop in pairwise(accumulate([sum(lengths)] if mixes else lengths, initial=0)):
        own = slice(start, stop)
        scores = torch.einsum("qhd,khd->hqk", q[own], k[own]) * (scale or q.shape[-1] ** -0.5)
        hidden = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v[own]))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


ROWS = {
    "one sample": (70,),
    "many, one of a token": (1, 33, 5, 1, 1, 40),
    "whole tiles": (32, 64, 32),
    "more than are looked at together": (2,) * 40 + (3,),
    "with a repeated boundary": (9, 0, 30, 0),
    "one token": (1,),
}
HEADS = [(2, 2), (4, 2), (6, 1)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_the_formula_is_attention_of_each_sample(name, heads):
    lengths = ROWS[name]
    tensors, grad = drawn(lengths, heads, 24, torch.float64)
    for scale in (None, 0.7):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = wide_attention(*leaves, boundaries(lengths), scale=scale)
        got = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        assert worst(got, of_samples(tensors, lengths, scale, grad)) < 1e-12


def test_an_operator_has_shapes_without_numbers():
    """As recorders and compilers ask for them: queries before keys, lse in float32."""
    q, k = (torch.empty(9, n, 320, dtype=LOW, device="meta") for n in (4, 2))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = OPERATORS.wide_attention(q, k, k, cu, 1.0)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, LOW, (4, 9), HIGH)
    grads = OPERATORS.wide_attention_backward(out, q, k, k, out, lse, cu, 1.0)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, LOW) for x in (q, k, k)]


@pytest.mark.parametrize(
    ("width", "window", "masks", "is_wide"),
    [
        (264, None, None, True),
        (256, None, None, False),
        (264, 5, None, False),
        (264, None, {}, False),
        (264, None, {"in_windows_alone": True}, True),
        (264, 5, {"in_windows_alone": True}, False),
    ],
    ids=str,
)
def test_layers_that_are_causal_over_segments_take_it(monkeypatch, width, window, masks, is_wide):
    """An image's tokens attend in both directions in all layers, or where there is a window."""
    lengths, called = (7, 12), []
    (q, k, v), _ = drawn(lengths, (4, 2), width)
    params = params_of(lengths)
    if masks is not None:
        masks = BlockMasks(lengths, ((8, 14),), torch.device("cpu"), **masks)
    how = {"scale": 0.1, "window": window, "masks": masks}
    monkeypatch.setattr(
        varlen, "wide_attention", lambda *a, **o: called.append(o) or wide_attention(*a, **o)
    )
    got = varlen.with_wide_heads(segment_attention)(q, k, v, params, **how)
    assert torch.allclose(got, segment_attention(q, k, v, params, **how), rtol=0, atol=1e-5)
    assert called == [{"scale": 0.1}] * is_wide


def test_rows_that_share_prefixes_take_masks_there(monkeypatch):
    """Kernels that return their log-sum-exp have no such heads."""
    tree = PrefixTree((-1, 0), (7, 12))
    params = with_forks(params_of(tree.lengths), tree)
    choice = AttentionChoice("torch_varlen", varlen.torch_varlen_attention, "played")
    monkeypatch.setattr(prefix_attention, "_kernel", lambda _: 1 / 0)
    for width in (264, 256):
        (q, k, v), _ = drawn(tree.lengths, (4, 2), width)
        attend = PrefixAttention(choice, PrefixRow(params))
        if width == 256:
            with pytest.raises(ZeroDivisionError):
                attend(q, k, v, params)
        else:
            assert attend(q, k, v, params).shape == q.shape


CASES = [
    *((name, heads, HIGH) for name in ROWS for heads in HEADS[1:]),
    ("many, one of a token", (2, 2), HIGH),
    *(("many, one of a token", (4, 2), dtype) for dtype in (LOW, HALF)),
]


@interpreted
@pytest.mark.parametrize(("name", "heads", "dtype"), CASES, ids=str)
def test_kernels_attend_inside_samples(interpreter, name, heads, dtype):
    """A head of 24 channels is read as 32, of which 8 are zeros."""
    lengths = ROWS[name]
    tensors, grad = drawn(lengths, heads, 24, dtype)
    got, is_kept = interpreter("wide_heads", tensors, boundaries(lengths), 0.3, grad)
    assert [x.dtype for x in got] == [dtype] * 4
    assert worst(got, of_samples(tensors, lengths, 0.3, grad)) < BOUND[dtype]
    assert is_kept
    if sum(lengths) > 1:
        assert worst(got, of_samples(tensors, lengths, 0.4, grad)) > 0.05
    if len(lengths) > 1:
        assert worst(got, of_samples(tensors, lengths, 0.3, grad, mixes=True)) > 0.1


@interpreted
@pytest.mark.parametrize(("width", "dtype"), [(512, LOW), (512, HALF), (320, LOW)], ids=str)
def test_heads_as_wide_as_those_that_need_them(interpreter, width, dtype):
    lengths = (3, 41, 9)
    tensors, grad = drawn(lengths, (2, 1), width, dtype)
    got, _ = interpreter("wide_heads", tensors, boundaries(lengths), None, grad)
    assert worst(got, of_samples(tensors, lengths, None, grad)) < BOUND[dtype]


@interpreted
def test_heads_may_lie_before_slots_and_a_gradient_may_be_one_number(interpreter):
    """As models hand them over, and as a sum's gradient comes back."""
    lengths = (5, 40)
    tensors, _ = drawn(lengths, (4, 2), 24)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    grad = torch.ones(()).expand(tensors[0].shape)
    got, _ = interpreter("wide_heads", apart, boundaries(lengths), None, grad)
    assert worst(got, of_samples(tensors, lengths, None, grad)) < BOUND[HIGH]


@interpreted
def test_there_may_be_no_slots(interpreter):
    tensors, grad = drawn((0,), (4, 2), 24)
    got, _ = interpreter("wide_heads", tensors, boundaries((0,)), None, grad)
    assert [tuple(x.shape) for x in got] == [(0, 4, 24), (0, 4, 24), (0, 2, 24), (0, 2, 24)]


@interpreted
@pytest.mark.parametrize("dtype", [HIGH, LOW], ids=str)
def test_neighbours_change_no_bit_of_a_sample(interpreter, dtype):
    """Of its outputs and its gradients, though it shares tiles with both. Neighbours are large."""
    lengths, own = (7, 38, 20), slice(7, 45)
    tensors, grad = drawn(lengths, (4, 2), 24, dtype)
    others = [x.clone() for x in (*tensors, grad)]
    for x in others:
        x[:7], x[45:] = 100 * x[:7] + 1, -50 * x[45:]
    cu = boundaries(lengths)
    first, _ = interpreter("wide_heads", tensors, cu, None, grad)
    second, _ = interpreter("wide_heads", others[:3], cu, None, others[3])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[own], b[own])
        assert not torch.equal(a[45:], b[45:])
    joined, _ = interpreter("wide_heads", others[:3], boundaries((7, 58)), None, others[3])
    assert not torch.equal(first[2][own], joined[2][own]), "control: gradients of one sample"
