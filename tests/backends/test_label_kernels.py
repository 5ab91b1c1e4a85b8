"""Triton's kernels of losses of logits (`vlmpack.backends.label_kernels`), run on a CPU by Triton's
interpreter, against torch in float64. `make kernels` installs Triton."""

from __future__ import annotations

import pytest
import torch
from support.interpreted import Interpreter, why_not_installed
from support.recurrences import worst

MISSING = why_not_installed()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
BOUND = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
"""Relative to the largest entry: of float32, and of a rounding to bfloat16's 8 bits."""


@pytest.fixture(scope="module")
def interpreter():
    process = Interpreter("fused")
    yield process
    process.close()


def drawn(*shapes, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("vocabulary", [50, 5000])
def test_losses_of_logits_and_their_gradients(interpreter, vocabulary, dtype, cap):
    """Large logits overflow no exponential, columns of a wider tensor stay as they are, and every
    row has its own factor."""
    (wide,), (grads,) = drawn((9, vocabulary + 8), dtype=dtype), drawn((9,))
    wide[3] *= 100
    logits, targets = wide[:, :vocabulary], torch.arange(9) * (vocabulary // 9)
    exact = logits.double().requires_grad_()
    bent = torch.tanh(exact / cap) * cap if cap else exact
    losses = torch.nn.functional.cross_entropy(bent, targets, reduction="none")
    (want,) = torch.autograd.grad(losses, exact, grads.double())
    (found, peaks, log_sums), got = interpreter("label_rows", logits, targets, grads, cap)
    assert worst([found], [losses.detach()]) < BOUND[torch.float32]
    assert worst([peaks + log_sums], [bent.detach().logsumexp(dim=1)]) < BOUND[torch.float32]
    assert got.dtype is dtype and worst([got], [want]) < BOUND[dtype]
    assert worst([got], [want * 1.1]) > 0.05
    assert cap or want[3].abs().max() > 0.1, "a cap leaves a large logit no slope"


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_logits_divided_by_temperatures(interpreter, dtype, cap):
    """A row each has its own, after the cap; the caller divides the gradients of the losses."""
    (logits,), (grads,) = drawn((9, 5000), dtype=dtype), drawn((9,))
    targets, temperatures = torch.arange(9) * 500, torch.linspace(0.3, 2.0, 9)
    exact = logits.double().requires_grad_()
    bent = torch.tanh(exact / cap) * cap if cap else exact
    divided = bent / temperatures.double()[:, None]
    losses = torch.nn.functional.cross_entropy(divided, targets, reduction="none")
    (want,) = torch.autograd.grad(losses, exact, grads.double())
    asked = ("label_rows", logits, targets, grads / temperatures, cap)
    (found, peaks, log_sums), got = interpreter(*asked, temperatures)
    assert worst([found], [losses.detach()]) < BOUND[torch.float32]
    assert worst([peaks + log_sums], [divided.detach().logsumexp(dim=1)]) < BOUND[torch.float32]
    assert worst([got], [want]) < BOUND[dtype]
    (undivided, _, _), _ = interpreter(*asked)
    assert worst([undivided], [losses.detach()]) > 0.01


def test_a_label_that_is_no_column_has_no_loss(interpreter):
    """Memory beside the row would be read, and a loss made of it."""
    (logits,), (grads,) = drawn((3, 50)), drawn((3,))
    (losses, _, _), _ = interpreter("label_rows", logits, torch.tensor([1, -100, 50]), grads, 0.0)
    assert losses.isnan().tolist() == [False, True, True]
