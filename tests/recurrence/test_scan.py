"""Mamba-2's scan: what its chunked forms have of their own, beside `test_chunked_forms.py`."""

from __future__ import annotations

import pytest
import torch
from recurrence.chunked_forms import SCAN
from recurrence.chunked_forms import scan_inputs as inputs
from recurrence.chunked_forms import scan_literal as literal
from recurrence.chunked_forms import scan_packed as packed
from support.recurrences import segments, worst
from torch.fx.experimental.proxy_tensor import make_fx

from vlmpack.recurrence import RowSegments, StepSize, fixed_scan

forms = pytest.mark.parametrize("form", SCAN.forms.values(), ids=SCAN.forms)
compared = SCAN.compared


@forms
def test_steps_are_clamped_and_nothing_is_skipped_where_nothing_is_asked(form):
    leaves, lengths = inputs(90), (20, 70)
    got = packed(form, leaves, lengths, (0.4, 0.9))
    assert worst([got.detach()], [literal(leaves, lengths, (0.4, 0.9)).detach()]) < 1e-12
    x, dt, b, c = (part.detach()[None] for part in leaves[:4])
    a, row = leaves[4].detach(), segments(lengths)
    plain = form(x, dt.abs(), a, b, c, row)
    assert torch.equal(plain, form(x, dt.abs(), a, b, c, row, skip=torch.zeros(4)))


@forms
@pytest.mark.parametrize("extreme", [1e4, 1e30])
def test_decays_to_nothing_are_exact_and_gradients_finite(form, extreme):
    leaves, lengths = inputs(200), (5, 90, 64, 41)
    with torch.no_grad():
        leaves[4][::2] = -extreme
        leaves[1][1::7] = -30.0  # hardly a step: nothing decays
    got, want = compared(form, lengths, leaves)
    assert all(x.isfinite().all() for x in got)
    assert worst(got, want) < 1e-12


@forms
def test_no_bit_changes_with_other_segments_content(form):
    leaves, lengths = inputs(200, torch.float32), (50, 90, 60)
    others = inputs(200, torch.float32, seed=1)
    inside = slice(50, 140)
    with torch.no_grad():
        for mine, other in zip(leaves[:4], others[:4], strict=True):
            other[inside] = mine[inside]
    assert not torch.equal(leaves[0], others[0])
    found = []
    for row in (leaves, [*others[:4], *leaves[4:]]):
        out = packed(form, row, lengths)[inside]
        grads = torch.autograd.grad(out.sum(), row[:4])
        found.append([out, *(x[inside] for x in grads)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_a_recording_of_the_fixed_form_serves_rows_of_other_segments():
    def step(cu_seqlens, *leaves):
        row = RowSegments((50, 90, 60), cu_seqlens)
        x, dt, b, c = (part[None] for part in leaves[:4])
        out = fixed_scan(x, dt, leaves[4], b, c, row, step_size=StepSize(softplus=True))
        return out, *torch.autograd.grad(out.sin().sum(), leaves[:5])

    recorded = make_fx(step)(segments((50, 90, 60)).cu_seqlens, *inputs(200))
    for number, lengths in enumerate(((200, 0, 0), (1, 150, 49))):
        arguments = (segments(lengths).cu_seqlens, *inputs(200, seed=number))
        for got, want in zip(recorded(*arguments), step(*arguments), strict=True):
            assert torch.equal(got, want)
