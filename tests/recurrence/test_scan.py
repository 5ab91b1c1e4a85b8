"""Both chunked forms of Mamba-2's scan against the recurrence itself, segment by segment."""

from __future__ import annotations

import pytest
import torch
from support.recurrences import (
    LAYOUTS,
    Operators,
    by_segment,
    segments,
    ssd,
    with_gradients,
    worst,
)
from torch.fx.experimental.proxy_tensor import make_fx

from vlmpack.recurrence import RowSegments, StepSize, fixed_scan, segment_scan

FORMS = {"segments": segment_scan, "fixed": fixed_scan}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def inputs(total, dtype=torch.float64, seed=0, decay=1.0):
    """x of 4 heads of width 5, raw steps, b and c of 2 groups of width 6; a, skip, dt's bias."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((total, 4, 5), (total, 4), (total, 2, 6), (total, 2, 6))
    tokens = [torch.randn(*s, generator=draw, dtype=torch.float64) for s in shapes]
    a = -decay * (0.1 + torch.rand(4, generator=draw, dtype=torch.float64))
    skip, bias = (torch.randn(4, generator=draw, dtype=torch.float64) for _ in range(2))
    return [x.to(dtype).requires_grad_() for x in (*tokens, a, skip, bias)]


def packed(form, leaves, lengths, limits=(0.0, float("inf"))):
    """(T, H, P) over a row of such segments."""
    x, dt, b, c = (part[None] for part in leaves[:4])
    a, skip, bias = leaves[4:]
    step_size = StepSize(bias=bias, softplus=True, limits=limits)
    return form(x, dt, a, b, c, segments(lengths), skip=skip, step_size=step_size)[0]


def literal(leaves, lengths, limits=(0.0, float("inf"))):
    def alone(*part):
        return ssd(*part, *leaves[4:], limits)

    return by_segment(alone, lengths, leaves[:4])


def compared(form, lengths, leaves, told=None):
    """Values and gradients of a form that was told of segments, and of the recurrence."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got = with_gradients(packed(form, leaves, told or lengths), leaves)
    return got, with_gradients(literal(exact, lengths), exact)


@forms
@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_values_and_gradients_are_those_of_each_segment_alone(form, lengths, dtype, bound):
    got, want = compared(form, lengths, inputs(sum(lengths), dtype))
    assert worst(got, want) < bound


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
@pytest.mark.parametrize("size", [1, 16, 64, 500])
def test_any_size_of_chunks_gives_the_same(form, size, monkeypatch):
    monkeypatch.setattr("vlmpack.recurrence.scan.chunk_size", lambda device: size)
    lengths = LAYOUTS["unequal"]
    got, want = compared(form, lengths, inputs(sum(lengths)))
    assert worst(got, want) < 1e-12


@forms
@pytest.mark.parametrize(
    ("told", "what"),
    [
        ((235,), "no reset at all"),
        ((20, 215), "state into the segment that fills the row"),
        ((20, 64, 64, 52, 35), "a reset at every chunk"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_resets_are_seen(form, told, what):
    got, want = compared(form, (20, 180, 35), inputs(235, decay=0.02), told)
    assert worst(got[:1], want[:1]) > 0.01, what
    assert worst(got[1:], want[1:]) > 0.01, what


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


@forms
def test_memory_is_linear_in_the_row(form):
    made = []
    for total in (512, 2048):
        leaves = inputs(total, torch.float32)
        with Operators() as seen:
            with_gradients(packed(form, leaves, (total,)), leaves)
        made.append(seen.bytes)
    assert made[1] < 4.1 * made[0]


def test_operators_of_the_fixed_form_are_the_same_whatever_the_segments():
    streams = []
    for lengths in ((50, 90, 60), (200, 0, 0), (1, 1, 198)):
        leaves = inputs(200)
        with Operators() as seen:
            with_gradients(packed(fixed_scan, leaves, lengths), leaves)
        streams.append(seen.stream)
    assert len(streams[0]) > 100
    assert streams[0] == streams[1] == streams[2]


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


@forms
def test_autocast_changes_nothing_inside(form):
    leaves = [x.detach() for x in inputs(70, torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = packed(form, leaves, (30, 40))
    assert torch.equal(inside, packed(form, leaves, (30, 40)))


@forms
def test_a_tensor_of_another_row_is_refused(form):
    with pytest.raises(ValueError, match="sum to 5 slots, the tensor has 6"):
        packed(form, inputs(6), (2, 3))
