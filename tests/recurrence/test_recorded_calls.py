"""A choice whose calls are recorded runs the same, and gives each call by our names."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import pytest
import torch

from vlmpack.recurrence import (
    KINDS,
    RowSegments,
    choose_recurrence,
    fixed_delta_rule,
    fixed_scan,
    recorded_by,
)
from vlmpack.recurrence.choose import (
    FORMS,
    conv1d_convolution,
    fla_convolution,
    fla_delta_rule,
    mamba_scan,
)

ROW = RowSegments((3, 2), torch.tensor([0, 3, 5], dtype=torch.int32))


def test_calls_are_told_by_name_with_their_row_and_output():
    plain = choose_recurrence(device=torch.device("cpu"), dtype=torch.float32)
    calls = []
    choice = recorded_by(calls.append, plain)
    x, filters = torch.randn(1, 4, 5), torch.randn(4, 2)
    found = choice.convolution.function(x, filters, None, ROW, activation="silu")
    assert torch.equal(found, plain.convolution.function(x, filters, None, ROW, activation="silu"))
    assert choice.described() == plain.described()
    (call,) = calls
    assert (call.kind, call.row) == ("convolution", ROW) and call.output is found
    assert call.given.keys() == {"x", "weight", "bias", "activation"}
    assert call.given["x"] is x and call.given["activation"] == "silu"


def test_an_error_is_told_to_nobody():
    def fails(*args, **kwargs):
        raise ValueError("a bug")

    plain = choose_recurrence(device=torch.device("cpu"), dtype=torch.float32)
    broken = replace(plain, scan=replace(plain.scan, function=fails))
    calls = []
    with pytest.raises(ValueError, match="a bug"):
        recorded_by(calls.append, broken).scan.function()
    assert calls == []


KERNELS = {
    "convolution": (conv1d_convolution, fla_convolution),
    "delta_rule": (fla_delta_rule, fixed_delta_rule),
    "scan": (mamba_scan, fixed_scan),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_implementations_have_these_arguments(kind):
    """In this order, of these kinds and with these defaults."""
    for function in KERNELS[kind]:
        assert str(signature(function)) == str(signature(FORMS[kind]))
