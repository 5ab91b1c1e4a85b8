"""A segment's convolution reads its own slots alone, whatever stands before it."""

from __future__ import annotations

import pytest
import torch
from support.recurrences import (
    LAYOUTS,
    Operators,
    by_segment,
    convolution,
    segments,
    with_gradients,
    worst,
)

from vlmpack.errors import CapabilityError
from vlmpack.recurrence import segment_convolution

CHANNELS = 6


def inputs(total, taps=4, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((total, CHANNELS), (CHANNELS, taps), (CHANNELS,))
    return [
        torch.randn(*s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


def packed(x, weight, bias, lengths, activation="silu"):
    """(T, D) from (T, D)."""
    row = segments(lengths)
    return segment_convolution(x.T[None], weight, bias, row, activation=activation)[0].T


def literal(x, weight, bias, lengths, activate=True):
    return by_segment(lambda part: convolution(part, weight, bias, activate=activate), lengths, [x])


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_values_and_gradients_are_those_of_each_segment_alone(lengths, taps, dtype, bound):
    leaves = inputs(sum(lengths), taps, dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got = with_gradients(packed(*leaves, lengths), leaves)
    assert worst(got, with_gradients(literal(*exact, lengths), exact)) < bound


def test_without_bias_and_activation():
    x, weight, _ = (part.detach() for part in inputs(12))
    found = packed(x, weight, None, (5, 7), activation=None)
    assert worst([found], [literal(x, weight, None, (5, 7), activate=False)]) < 1e-14


def test_a_convolution_without_resets_is_seen():
    leaves, lengths = inputs(40), (13, 20, 7)
    want = with_gradients(literal(*leaves, lengths), leaves)
    assert worst(with_gradients(packed(*leaves, (40,)), leaves), want) > 0.05
    assert worst(with_gradients(packed(*leaves, (13, 27)), leaves), want) > 0.05  # into the last


def test_no_bit_changes_with_another_segments_content():
    x, weight, bias = inputs(40, dtype=torch.float32)
    other = x.detach().clone()
    other[:13] = torch.nan
    other[33:] *= -3
    found = []
    for row in (x, other.requires_grad_()):
        out = packed(row, weight, bias, (13, 20, 7))[13:33]
        found.append((out, torch.autograd.grad(out.sum(), row)[0][13:33]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_low_precision_is_computed_in_float32():
    x, weight, bias = (part.detach() for part in inputs(30, dtype=torch.bfloat16))
    found = packed(x, weight.float(), bias.float(), (10, 20))
    assert found.dtype is torch.bfloat16
    wide = packed(x.float(), weight.float(), bias.float(), (10, 20))
    assert torch.equal(found, wide.bfloat16())


def test_operators_are_the_same_whatever_the_segments():
    streams = []
    for lengths in ((13, 20, 7), (40, 0, 0), (1, 1, 38)):
        leaves = inputs(40)
        with Operators() as seen:
            with_gradients(packed(*leaves, lengths), leaves)
        streams.append(seen.stream)
    assert len(streams[0]) > 20
    assert streams[0] == streams[1] == streams[2]


def test_another_activation_is_refused():
    with pytest.raises(CapabilityError, match="activation 'gelu' is not supported"):
        packed(*inputs(5), (5,), activation="gelu")
