"""Two varlen calls merged by their log-sum-exp, against one softmax over all keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention.test_prefix_attention import ROWS, attend, real
from attention.test_segments import inputs, params_of

from vlmpack.attention import prefix_attention
from vlmpack.attention.prefix_attention import PrefixCalls, Qkv, prefix_varlen_attention
from vlmpack.errors import CapabilityError
from vlmpack.packing.prefix_tree import PrefixTree, prefix_levels

FORKED = ["two answers", "unequal answers", "two prompts", "a tree"]


class Plain:
    """A varlen kernel as flash-attn documents one, stretch by stretch, in the inputs' dtype; its
    backward pass is told output and lse, and computes neither again."""

    @staticmethod
    def _stretches(call):
        bounds = zip(pairwise(call.cu_q.tolist()), pairwise(call.cu_k.tolist()), strict=True)
        return [(slice(*q), slice(*k)) for q, k in bounds if q[0] < q[1]]

    @staticmethod
    def _scores(query, key, call, scale):
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        if call.causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:]).bool().tril(), -torch.inf)
        return scores

    def forward(self, qkv, call, scale):
        query, key, value = qkv
        out, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0])
        for q, k in self._stretches(call):
            scores = self._scores(query[q], key[k], call, scale)
            lse[:, q] = scores.logsumexp(dim=-1)
            out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value[k])
        return out, lse

    def backward(self, grad, qkv, out, lse, call, scale):
        query, key, value = qkv
        dq, dk, dv = (torch.zeros_like(part) for part in qkv)
        for q, k in self._stretches(call):
            scores = self._scores(query[q], key[k], call, scale)
            weights = (scores - lse[:, q, None]).exp()
            dv[k] += torch.einsum("hqk,qhd->khd", weights, grad[q])
            each = torch.einsum("qhd,khd->hqk", grad[q], value[k])
            each = weights * (each - (grad[q] * out[q]).sum(-1).T[..., None]) * scale
            dq[q] += torch.einsum("hqk,khd->qhd", each, key[k])
            dk[k] += torch.einsum("hqk,qhd->khd", each, query[q])
        return Qkv(dq, dk, dv)


def with_forks(params, prefix_tree):
    return replace(
        params,
        prefix_tree=prefix_tree,
        prefix_levels=prefix_levels(prefix_tree, params.segment_lengths),
    )


def row_of(name, multiple=1):
    prefix_tree = PrefixTree(*ROWS[name])
    physical = tuple(-(-n // multiple) * multiple for n in prefix_tree.lengths)
    params = params_of(prefix_tree.lengths, physical if multiple > 1 else None)
    return prefix_tree, with_forks(params, prefix_tree), real(prefix_tree, physical)


def differences(name, multiple=1):
    prefix_tree, params, slots = row_of(name, multiple)
    tensors = inputs(sum(params.segment_lengths), dtype=torch.float64)
    ours = prefix_varlen_attention(*tensors, PrefixCalls.of(params), Plain())[slots]
    theirs = attend(tensors, params, prefix_tree)[slots]
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).double()
    grads = [torch.autograd.grad((each * weights).sum(), tensors) for each in (ours, theirs)]
    value = (ours - theirs).abs().max().item()
    return value, max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("multiple", [1, 8], ids=["no gaps", "gaps"])
@pytest.mark.parametrize("name", FORKED)
def test_equals_one_softmax(name, multiple):
    assert max(differences(name, multiple)) < 1e-12


def test_a_mean_of_the_two_calls_is_found(monkeypatch):
    def mean(own, path, branches):
        out = own[0].clone()
        out[branches] = (own[0][branches] + path[0]) / 2
        return out, own[1]

    monkeypatch.setattr(prefix_attention, "merge_lse", mean)
    value, gradient = differences("two answers")
    assert value > 0.05
    assert gradient > 0.05


def test_each_calls_own_lse_in_the_backward_pass_is_found(monkeypatch):
    whole = prefix_attention.merge_lse
    monkeypatch.setattr(
        prefix_attention, "merge_lse", lambda own, *rest: (whole(own, *rest)[0], own[1])
    )
    value, gradient = differences("two answers")
    assert value < 1e-12
    assert gradient > 0.05


def test_what_varlen_calls_cannot_say_is_refused():
    prefix_tree, params, _ = row_of("two answers")
    apart = replace(prefix_tree, parents=(-1, -1, 0))
    with pytest.raises(CapabilityError, match=r"branches side by side.*segments"):
        with_forks(params, apart)
    none = replace(prefix_tree, parents=(-1,) * len(prefix_tree.lengths))
    for row in (replace(params, prefix_tree=None, prefix_levels=()), with_forks(params, none)):
        with pytest.raises(CapabilityError, match="without shared prefixes"):
            PrefixCalls.of(row)
