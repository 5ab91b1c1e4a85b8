"""Which attention a row with shared prefixes gets, and that kernels are called as they are
declared: their arithmetic is played by plain torch."""

from __future__ import annotations

import sys
from inspect import signature
from types import ModuleType, SimpleNamespace

import pytest
import torch
from attention.test_prefix_attention import ROWS, attend, real
from attention.test_prefix_calls import Plain, with_forks
from attention.test_segments import inputs, params_of

from vlmpack.attention import AttentionChoice, BlockMasks, choose_attention, segment_attention
from vlmpack.attention import prefix_attention as forked_module
from vlmpack.attention.prefix_attention import (
    FlashKernel,
    PrefixAttention,
    PrefixCalls,
    PrefixRow,
    Qkv,
    TorchKernel,
    VarlenCall,
    kernel_with_lse,
    prefix_varlen_attention,
)
from vlmpack.attention.varlen import _FUNCTIONS, torch_varlen_attention
from vlmpack.backends.hf import attention as hf_attention
from vlmpack.errors import CapabilityError
from vlmpack.packing.prefix_tree import PrefixTree

SEGMENTS = choose_attention("segments", device=torch.device("cpu"), dtype=torch.float32)
KERNEL = AttentionChoice("torch_varlen", torch_varlen_attention, "played")


def row(name="a tree"):
    prefix_tree = PrefixTree(*ROWS[name])
    return with_forks(params_of(prefix_tree.lengths), prefix_tree)


@pytest.mark.parametrize(("parents", "prefixes"), [((-1, -1), 0), ((-1, 0), 1)])
def test_a_row_without_shared_prefixes_gets_the_choice_itself(monkeypatch, parents, prefixes):
    made, called = [], []

    def same(query, key, value, params, **_):
        called.append(params)
        return query

    monkeypatch.setattr(hf_attention, "PrefixAttention", lambda *of: made.append(of) or same)
    params = params_of((3, 4))
    if prefixes:
        params = with_forks(params, PrefixTree(parents, (3, 4)))
    choice = AttentionChoice("segments", same, "played")
    tensors = (part.transpose(0, 1)[None] for part in inputs(7))
    hf_attention._attend(choice, torch.nn.Module(), *tensors, None, packed_seq_params=params)
    assert called == [params]
    assert len(made) == prefixes


def test_masks_do_where_no_kernel_can(monkeypatch):
    called = []
    monkeypatch.setattr(forked_module, "_kernel", lambda name: called.append(name) or Plain())
    params = row()
    tensors = inputs(sum(params.segment_lengths), kv_heads=2, dtype=torch.float64)
    made = PrefixRow(params)
    for given, window in ((None, None), (made, 3)):
        ours = PrefixAttention(KERNEL, given)(*tensors, params, window=window)
        theirs = attend(tensors, params, params.prefix_tree, window=window)
        assert torch.equal(ours, theirs)
    assert called == []
    ours = PrefixAttention(KERNEL, made)(*tensors, params)
    assert called == ["torch_varlen"]
    theirs = attend(tensors, params, params.prefix_tree)
    slots = real(params.prefix_tree, params.segment_lengths)
    assert torch.allclose(ours[slots], theirs[slots], rtol=0, atol=1e-12)


def test_what_takes_no_forks_refuses_them():
    params = row()
    tensors = inputs(sum(params.segment_lengths))
    with pytest.raises(ValueError, match="need prefix_attention"):
        segment_attention(*tensors, params)
    with pytest.raises(ValueError, match="more than one call of torch_varlen"):
        torch_varlen_attention(*tensors, params)
    masks = BlockMasks(params.segment_lengths, (), torch.device("cpu"))
    with pytest.raises(CapabilityError, match=r"in both directions.*share_prefix"):
        PrefixAttention(SEGMENTS, None)(*tensors, params, masks=masks)


def call_of(bounds, causal):
    return VarlenCall(*bounds, causal=causal)


class PlayedOps:
    """torch's two operators, as their schemas have them."""

    def _flash_attention_forward(self, q, k, v, cq, ck, mq, mk, dropout, causal, debug, *, scale):
        assert (dropout, debug) == (0.0, False)
        call = call_of((cq, ck, mq, mk), causal)
        return *Plain().forward(Qkv(q, k, v), call, scale), None, None, None

    def _flash_attention_backward(
        self, grad, q, k, v, out, lse, cq, ck, mq, mk, dropout, causal, rng, unused, *, scale
    ):
        assert (dropout, len(rng), len(unused)) == (0.0, 2, 0)
        call = call_of((cq, ck, mq, mk), causal)
        return Plain().backward(grad, Qkv(q, k, v), out, lse, call, scale)


def played_interface():
    """flash-attn's two functions; gradients are written where the caller says."""
    module = ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        call = call_of(bounds, causal)
        return *Plain().forward(Qkv(q, k, v), call, softmax_scale), None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        call = call_of(bounds, causal)
        found = Plain().backward(dout, Qkv(q, k, v), out, softmax_lse, call, softmax_scale)
        for place, value in zip((dq, dk, dv), found, strict=True):
            place.copy_(value)

    module._flash_attn_varlen_forward = _flash_attn_varlen_forward
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return module


@pytest.mark.parametrize(
    "kernel", [TorchKernel(PlayedOps()), FlashKernel(played_interface())], ids=["torch", "flash"]
)
def test_a_kernels_pieces_make_one_softmax(kernel):
    params = row()
    tensors = inputs(sum(params.segment_lengths), dtype=torch.float64)
    slots = real(params.prefix_tree, params.segment_lengths)
    ours = prefix_varlen_attention(*tensors, PrefixCalls.of(params), kernel)[slots]
    theirs = attend(tensors, params, params.prefix_tree)[slots]
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).double()
    mine, stock = (torch.autograd.grad((each * weights).sum(), tensors) for each in (ours, theirs))
    for a, b in zip(mine, stock, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_pieces_of_other_names_are_not_called(monkeypatch):
    assert isinstance(kernel_with_lse("torch_varlen"), TorchKernel), "as this torch declares them"
    assert kernel_with_lse("segments") is None
    interface = played_interface()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    assert isinstance(kernel_with_lse("flash_attn"), FlashKernel)
    interface._flash_attn_varlen_backward = lambda dout, q, k, v: None
    assert kernel_with_lse("flash_attn") is None
    del interface._flash_attn_varlen_backward
    assert kernel_with_lse("flash_attn") is None
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace())
    assert kernel_with_lse("torch_varlen") is None


@pytest.mark.parametrize("function", [*_FUNCTIONS.values(), PrefixAttention(SEGMENTS, None)])
def test_every_attention_has_the_same_arguments(function):
    """In this order, of these kinds and with these defaults."""
    assert str(signature(function)) == str(signature(segment_attention))
