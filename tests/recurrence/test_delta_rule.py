"""Both chunked forms of the gated delta rule against the rule itself, segment by segment."""

from __future__ import annotations

import pytest
import torch
from support.recurrences import (
    LAYOUTS,
    Operators,
    by_segment,
    delta_rule,
    segments,
    with_gradients,
    worst,
)
from torch.fx.experimental.proxy_tensor import make_fx

from vlmpack.recurrence import RowSegments, fixed_delta_rule, segment_delta_rule

FORMS = {"segments": segment_delta_rule, "fixed": fixed_delta_rule}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def inputs(total, dtype=torch.float64, seed=0, decay=1.0):
    """Queries and keys of 2 heads of width 6 and values of 4 of width 5, g and beta."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(total, heads, width, generator=draw, dtype=torch.float64)
        for heads, width in ((2, 6), (2, 6), (4, 5))
    )
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -decay * torch.rand(total, 4, generator=draw, dtype=torch.float64)
    beta = torch.rand(total, 4, generator=draw, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


def packed(form, leaves, lengths, **options):
    """(T, H, V) over a row of such segments."""
    return form(*(x[None] for x in leaves), segments(lengths), **options)[0]


def compared(form, lengths, leaves, told=None):
    """Values and gradients of a form that was told of segments, and of the rule."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got = with_gradients(packed(form, leaves, told or lengths), leaves)
    return got, with_gradients(by_segment(delta_rule, lengths, exact), exact)


@forms
@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_values_and_gradients_are_those_of_each_segment_alone(form, lengths, dtype, bound):
    got, want = compared(form, lengths, inputs(sum(lengths), dtype))
    assert worst(got, want) < bound


@forms
def test_queries_and_keys_can_be_normalized_inside(form):
    leaves, lengths = inputs(90), (20, 70)
    leaves[:2] = [(3 * x.detach()).requires_grad_() for x in leaves[:2]]
    want = by_segment(lambda *part: delta_rule(*part, normalize=True), lengths, leaves)
    got = packed(form, leaves, lengths, normalize=True)
    assert worst(with_gradients(got, leaves), with_gradients(want, leaves)) < 1e-12


@forms
@pytest.mark.parametrize("size", [1, 16, 64, 500])
def test_any_size_of_chunks_gives_the_same(form, size, monkeypatch):
    monkeypatch.setattr("vlmpack.recurrence.delta_rule.chunk_size", lambda device: size)
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
    streams = {}
    for name, form in FORMS.items():
        for lengths in ((50, 90, 60), (200, 0, 0), (1, 1, 198)):
            leaves = inputs(200)
            with Operators() as seen:
                with_gradients(packed(form, leaves, lengths), leaves)
            streams.setdefault(name, []).append(seen.stream)
    assert len(streams["fixed"][0]) > 100
    assert streams["fixed"][0] == streams["fixed"][1] == streams["fixed"][2]
    assert streams["segments"][0] != streams["segments"][1]


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
