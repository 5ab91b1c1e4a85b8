"""liger's gated activations, run by Triton's interpreter on a CPU, against the formulas; `make
kernels` installs them. `test_row_kernels.py` has our own kernels."""

from __future__ import annotations

import pytest
import torch
from support.interpreted import Interpreter, why_not_installed
from support.recurrences import with_gradients, worst

from vlmpack.backends.fused import ACTIVATIONS

MISSING = why_not_installed()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
BOUND = {torch.float32: 1e-6, torch.float16: 2e-3}
"""Relative to the largest entry. The interpreter computes in float16, not in bfloat16."""


@pytest.fixture(scope="module")
def interpreter():
    process = Interpreter("fused")
    yield process
    process.close()


def drawn(*shapes, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def of_gated(activation, tensors):
    leaves = [x.double().requires_grad_() for x in tensors]
    gate, up = leaves
    return with_gradients(ACTIVATIONS[activation](gate) * up, leaves)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations_and_their_gradients_are_the_formula(interpreter, activation, dtype):
    tensors = drawn((1, 7, 40), (1, 7, 40), dtype=dtype)
    got = interpreter("fused_gated", activation, tensors)
    want = of_gated(activation, tensors)
    assert worst(got, want) < BOUND[dtype]
    (other,) = set(ACTIVATIONS) - {activation}
    assert worst(got, of_gated(other, tensors)) > 0.02
    assert worst(got, of_gated(activation, tensors[::-1])) > 0.1
