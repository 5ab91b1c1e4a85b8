"""The gated delta rule: what its chunked forms have of their own; see `test_chunked_forms.py`."""

from __future__ import annotations

import pytest
import torch
from recurrence.chunked_forms import DELTA_RULE
from recurrence.chunked_forms import delta_inputs as inputs
from recurrence.chunked_forms import delta_packed as packed
from support.recurrences import by_segment, delta_rule, segments, with_gradients, worst
from torch.fx.experimental.proxy_tensor import make_fx

import vlmpack.recurrence.delta_rule as forms_of_it
from vlmpack.recurrence import RowSegments, fixed_delta_rule

forms = pytest.mark.parametrize("form", DELTA_RULE.forms.values(), ids=DELTA_RULE.forms)
compared = DELTA_RULE.compared


@forms
def test_queries_and_keys_can_be_normalized_inside(form):
    leaves, lengths = inputs(90), (20, 70)
    leaves[:2] = [(3 * x.detach()).requires_grad_() for x in leaves[:2]]
    want = by_segment(lambda *part: delta_rule(*part, normalize=True), lengths, leaves)
    got = packed(form, leaves, lengths, normalize=True)
    assert worst(with_gradients(got, leaves), with_gradients(want, leaves)) < 1e-12


@forms
@pytest.mark.parametrize("extreme", [-1e4, -1e30, -float("inf")])
def test_decays_to_nothing_are_exact_and_gradients_finite(form, extreme):
    leaves, lengths = inputs(200), (5, 90, 64, 41)
    with torch.no_grad():
        leaves[3][::3] = extreme
        leaves[3][1::7] = 0.0
        leaves[3][94:97] = extreme
    got, want = compared(form, lengths, leaves)
    assert all(x.isfinite().all() for x in got)
    assert worst(got, want) < 1e-12


@forms
def test_strong_decays_elsewhere_round_nothing_away(form):
    leaves, lengths = inputs(120, torch.float32), (60, 60)
    with torch.no_grad():
        leaves[3][:60] = -1e5  # a sum that runs on would keep two digits of what follows
    got, want = compared(form, lengths, leaves)
    assert worst([x[60:] for x in got], [x[60:] for x in want]) < 5e-6


@forms
def test_no_bit_changes_with_other_segments_content(form):
    leaves, lengths = inputs(200, torch.float32), (50, 90, 60)
    others = inputs(200, torch.float32, seed=1)
    inside = slice(50, 140)
    with torch.no_grad():
        for mine, other in zip(leaves, others, strict=True):
            other[inside] = mine[inside]
    found = []
    for row in (leaves, others):
        out = packed(form, row, lengths)[inside]
        found.append([out, *(x[inside] for x in torch.autograd.grad(out.sum(), row))])
    assert not torch.equal(leaves[0], others[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_a_recording_of_the_fixed_form_serves_rows_of_other_segments():
    def step(cu_seqlens, *leaves):
        row = RowSegments((50, 90, 60), cu_seqlens)
        out = fixed_delta_rule(*(x[None] for x in leaves), row)
        return out, *torch.autograd.grad(out.sin().sum(), leaves)

    recorded = make_fx(step)(segments((50, 90, 60)).cu_seqlens, *inputs(200))
    for number, lengths in enumerate(((200, 0, 0), (1, 150, 49))):
        arguments = (segments(lengths).cu_seqlens, *inputs(200, seed=number))
        for got, want in zip(recorded(*arguments), step(*arguments), strict=True):
            assert torch.equal(got, want)


def errors_of(rule, leaves, wanted):
    """Relative L2 of the output and of each gradient, computed in float32, against double."""
    floats = [x.detach().float().requires_grad_() for x in leaves]
    got = with_gradients(rule(floats), floats)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]


def stock_rule(leaves):
    """transformers' own chunks."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    out, _ = torch_chunk_gated_delta_rule(*(x[None] for x in leaves), use_qk_l2norm_in_kernel=True)
    return out[0]


STOCK_FACTOR = 1.1
"""Largest error of ours in float32 over that of transformers' rule, both against double; it is 0.4
to 1.0 where decays are mild, and below 0.2 where they are those of published models."""


@pytest.mark.cases(quick="0.04-fixed", slow="*")
@forms
@pytest.mark.parametrize("decay", [0.04, 2.0, 32.0])
def test_float32_rounds_no_worse_than_transformers_own_rule(form, decay, monkeypatch):
    """The definition in double, token by token, is what both are held against."""

    def ours(leaves):
        return packed(form, leaves, (150,), normalize=True)

    for seed in range(3):
        drawn = inputs(150, torch.float32, seed=seed, decay=decay)
        leaves = [x.detach().double().requires_grad_() for x in drawn]
        definition = delta_rule(*leaves, normalize=True)
        wanted = with_gradients(definition, leaves)
        theirs = errors_of(stock_rule, leaves, wanted)
        assert all(1e-8 < error < 1e-4 for error in theirs), theirs
        errors = errors_of(ours, leaves, wanted)
        ratios = [one / other for one, other in zip(errors, theirs, strict=True)]
        assert max(ratios) <= STOCK_FACTOR, ratios
    right = forms_of_it.decays
    monkeypatch.setattr(forms_of_it, "decays", lambda g, seen: right(g.half().float(), seen))
    coarse = errors_of(ours, leaves, wanted)
    assert max(a / b for a, b in zip(coarse, theirs, strict=True)) > STOCK_FACTOR
