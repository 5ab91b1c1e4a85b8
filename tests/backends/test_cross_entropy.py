"""The chunked head and loss against F.cross_entropy on whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.alive import Alive
from support.recorders import MadeTensors
from support.recurrences import Operators

from vlmpack.backends import cross_entropy
from vlmpack.backends.cross_entropy import (
    CHUNK_BYTES,
    CUDA_CHUNK_BYTES,
    KERNEL_CHUNK_BYTES,
    chunk_rows,
    linear_cross_entropy,
)
from vlmpack.packing import IGNORE_INDEX

VOCABULARY, WIDTH = 50, 16


def inputs(rows, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (rows,), generator=draw)
    return hidden, weight, targets


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 20, 21, 1000, None])
def test_values_and_both_gradients(rows_per_chunk):
    hidden, weight, targets = inputs(21)
    mixing = torch.linspace(-1, 2, 21)  # another factor for every token
    ours = linear_cross_entropy(hidden, weight, targets, rows_per_chunk=rows_per_chunk)
    theirs = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for mine, other in zip(
        torch.autograd.grad((ours * mixing).sum(), (hidden, weight)),
        torch.autograd.grad((theirs * mixing).sum(), (hidden, weight)),
        strict=True,
    ):
        # Sums over 21 tokens or 50 words in another order: a few roundings of float32.
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows_per_chunk", [1, 7, None])
@pytest.mark.parametrize("cap", [0.5, 3.0, 30.0])
def test_capped_logits_values_and_both_gradients(cap, rows_per_chunk):
    """As transformers' Gemma caps them, in double; logits are about 4, so 0.5 bends all of them."""
    hidden, weight, targets = inputs(21)
    mixing = torch.linspace(-1, 2, 21)
    ours = linear_cross_entropy(hidden, weight, targets, rows_per_chunk=rows_per_chunk, cap=cap)
    logits = torch.tanh(hidden.double() @ weight.double().T / cap) * cap
    theirs = F.cross_entropy(logits, targets, reduction="none").float()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    uncapped = linear_cross_entropy(hidden, weight, targets)
    assert (uncapped - ours).abs().max() > 0.01, "the cap had no effect"
    for mine, other in zip(
        torch.autograd.grad((ours * mixing).sum(), (hidden, weight)),
        torch.autograd.grad((theirs * mixing).sum(), (hidden, weight)),
        strict=True,
    ):
        assert other.norm() > 0.01
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


TEMPERATURES = torch.linspace(0.3, 2.0, 21)


@pytest.mark.parametrize("rows_per_chunk", [1, 7, None])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_logits_divided_by_temperatures(cap, rows_per_chunk):
    """A row each has its own, and a cap comes before it: what samplers draw from."""
    hidden, weight, targets = inputs(21)
    mixing, given = torch.linspace(-1, 2, 21), {"rows_per_chunk": rows_per_chunk, "cap": cap}
    ours = linear_cross_entropy(hidden, weight, targets, temperatures=TEMPERATURES, **given)
    logits = hidden.double() @ weight.double().T
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    logits = logits / TEMPERATURES.double()[:, None]
    theirs = F.cross_entropy(logits, targets, reduction="none").float()
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    undivided = linear_cross_entropy(hidden, weight, targets, **given)
    assert (undivided - ours).abs().max() > 0.1, "temperatures had no effect"
    for mine, other in zip(
        torch.autograd.grad((ours * mixing).sum(), (hidden, weight)),
        torch.autograd.grad((theirs * mixing).sum(), (hidden, weight)),
        strict=True,
    ):
        assert other.norm() > 0.01
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)


def test_no_label_gives_zero_gradients_not_none():
    hidden, weight, targets = inputs(0)
    losses = linear_cross_entropy(hidden, weight, targets)
    assert losses.shape == (0,)
    assert losses.dtype == torch.float32
    gradients = torch.autograd.grad(losses.sum(), (hidden, weight))
    assert gradients[0].shape == (0, WIDTH)
    assert torch.equal(gradients[1], torch.zeros_like(weight))


@pytest.mark.parametrize("rows_per_chunk", [5, None])
def test_bfloat16_hidden_states_keep_float32_losses_and_weight_gradients(rows_per_chunk):
    hidden, weight, targets = inputs(21, torch.bfloat16)
    losses = linear_cross_entropy(hidden, weight, targets, rows_per_chunk=rows_per_chunk)
    assert losses.dtype == torch.float32
    exact = F.cross_entropy(hidden.float() @ weight.T, targets, reduction="none")
    # Logits of size 10 rounded to 8 bits: 2 ** -8 * 10, twice.
    assert (losses - exact).abs().max() < 0.08
    losses.mean().backward()
    assert hidden.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    exact_hidden, exact_weight = torch.autograd.grad(exact.mean(), (hidden, weight))
    for mine, other in ((hidden.grad, exact_hidden), (weight.grad, exact_weight)):
        assert (mine.float() - other).norm() / other.norm() < 0.02


def test_large_logits_do_not_overflow():
    hidden, weight, targets = inputs(4)
    losses = linear_cross_entropy(hidden * 1e4, weight, targets)
    assert torch.isfinite(losses).all()
    torch.testing.assert_close(
        losses, F.cross_entropy(hidden * 1e4 @ weight.T, targets, reduction="none")
    )


def test_an_ignored_label_is_an_error_not_a_loss():
    """The kernel of another project returned a loss for label -100."""
    hidden, weight, targets = inputs(4)
    targets[1] = IGNORE_INDEX
    with pytest.raises((RuntimeError, IndexError)):
        linear_cross_entropy(hidden, weight, targets)


def test_chunks_bound_the_logits():
    for cuda, most in ((False, CHUNK_BYTES), (True, CUDA_CHUNK_BYTES)):
        rows = chunk_rows(152_064, cuda=cuda)
        assert 4 * rows * 152_064 <= most < 4 * (rows + 1) * 152_064
        assert chunk_rows(most * 2, cuda=cuda) == 1
    rows = chunk_rows(152_064, cuda=True, kernels=True)
    assert 2 * rows * 152_064 <= KERNEL_CHUNK_BYTES < 2 * (rows + 1) * 152_064
    assert 8 <= CUDA_CHUNK_BYTES // CHUNK_BYTES <= 16
    hidden, weight, targets = inputs(40)
    with MadeTensors() as tensors:
        linear_cross_entropy(hidden, weight, targets, rows_per_chunk=6).sum().backward()
    logits = tensors.where(lambda made: made.shape[-1:] == (VOCABULARY,) and made.shape != (16, 50))
    assert logits
    assert max(made.shape[0] for made in logits) == 6


def test_a_frozen_head_gets_no_gradient_that_nobody_asks_for():
    gradients, large = [], []
    for trains in (True, False):
        hidden, weight, targets = inputs(40)
        weight.requires_grad_(trains)
        losses = linear_cross_entropy(hidden, weight, targets, rows_per_chunk=6)
        with MadeTensors() as tensors:
            losses.sum().backward()
        assert (weight.grad is not None) is trains
        gradients.append(hidden.grad)
        large.append(tensors.where(lambda made: made.shape == (VOCABULARY, WIDTH)))
    assert torch.equal(*gradients)
    assert large[0] and not large[1]


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_trained_head_takes_what_the_plan_says(dtype, number):
    """Its gradient in float32 and a product beside it; no third copy where dtypes differ."""
    vocabulary, width, rows = 4000, 64, 4
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width).to(dtype).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    targets = torch.arange(rows)
    with Alive([hidden, weight, weight.grad, targets]) as alive:
        linear_cross_entropy(hidden, weight, targets, rows_per_chunk=rows).sum().backward()
    head = (4 + number) * width * vocabulary
    assert head <= alive.peak <= head + 3 * 4 * rows * vocabulary


@pytest.fixture
def kernels(monkeypatch):
    """The form for kernels, whose operators are formulas on a CPU."""
    monkeypatch.setattr(cross_entropy, "has_kernels", lambda _: True)


@pytest.mark.parametrize("trains", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("is_padded", [False, True], ids=["as it is", "rows of zeros"])
@pytest.mark.parametrize("temperatures", [None, TEMPERATURES.double()], ids=["1", "each"])
@pytest.mark.parametrize("rows_per_chunk", [1, 7, None])
def test_the_form_for_kernels_in_double(
    kernels, monkeypatch, rows_per_chunk, temperatures, is_padded, cap, trains
):
    """50 rows of a head are computed as 56 where the product gains by it."""
    monkeypatch.setattr(cross_entropy, "is_uneven", lambda *_: is_padded)
    hidden, weight, targets = inputs(21, torch.float64)
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().double()
    weight.requires_grad_(trains)
    leaves = (hidden, weight) if trains else (hidden,)
    mixing = torch.linspace(-1, 2, 21).double()
    given = {"rows_per_chunk": rows_per_chunk, "cap": cap, "temperatures": temperatures}
    with Operators() as operators:
        ours = linear_cross_entropy(hidden, weight, targets, **given)
    assert any("mm" in name and "56" in str(each) for name, *each in operators.stream) is is_padded
    assert type(ours.grad_fn).__name__ == "_FusedCrossEntropyBackward"
    logits = hidden @ weight.T
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    by = 1.0 if temperatures is None else temperatures[:, None]
    theirs = F.cross_entropy(logits / by, targets, reduction="none")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad((x * mixing).sum(), leaves) for x in (ours, theirs))
    for mine, other in zip(found, wanted, strict=True):
        assert other.norm() > 0.01
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    without = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets), leaves)
    assert (without[0] - found[0]).norm() > 0.01, "another factor for every token"


def test_the_form_for_kernels_multiplies_by_a_frozen_head_twice(kernels):
    """The logits, and their gradient by the head; a trained head makes them again."""
    for trains, products in ((False, 2), (True, 4)):
        hidden, weight, targets = inputs(21)
        with Operators() as operators:
            weight.requires_grad_(trains)
            linear_cross_entropy(hidden, weight, targets).sum().backward()
        made = sum(name.startswith("aten.mm") for name, *_ in operators.stream)
        assert made == products
        hidden, weight, targets = inputs(0)
        weight.requires_grad_(trains)
        linear_cross_entropy(hidden, weight, targets).sum().backward()
        assert hidden.grad.shape == (0, WIDTH) and (weight.grad is not None) is trains


@pytest.mark.parametrize("form", ["torch", "kernels", "kernels and a frozen head"])
def test_a_second_derivative_is_refused_by_name(form, request):
    if form != "torch":
        request.getfixturevalue("kernels")
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw, requires_grad=True) for n in (5, 11))
    weight = weight.detach() if "frozen" in form else weight
    losses = linear_cross_entropy(hidden, weight, torch.arange(5))
    (grad,) = torch.autograd.grad(losses.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_the_form_for_kernels_without_gradients(kernels):
    hidden, weight, targets = inputs(21)
    with torch.no_grad():
        losses = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(
        losses, F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    )
