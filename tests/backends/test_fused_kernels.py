"""liger's norms, gated activations and rotations, run by Triton's interpreter on a CPU, against the
formulas; `make kernels` installs them."""

from __future__ import annotations

import pytest
import torch
from support.interpreted import Interpreter, why_not_installed
from support.recurrences import with_gradients, worst

from vlmpack.backends.fused import ACTIVATIONS, FORMS, NormForm

MISSING = why_not_installed()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
BOUND = {torch.float32: 1e-6, torch.float16: 2e-3}
"""Relative to the largest entry. The interpreter computes in float16, not in bfloat16."""


@pytest.fixture(scope="module")
def interpreter():
    process = Interpreter("liger")
    yield process
    process.close()


def drawn(*shapes, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def of_form(form, tensors, eps):
    leaves = [x.double().requires_grad_() for x in tensors]
    x, weight = leaves
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return with_gradients(normed * (form.offset + weight), leaves)


def of_gated(activation, tensors):
    leaves = [x.double().requires_grad_() for x in tensors]
    gate, up = leaves
    return with_gradients(ACTIVATIONS[activation](gate) * up, leaves)


@pytest.mark.cases(
    slow=(
        "NormForm(offset=0.0, rounds_first=True)-torch.float32",
        "NormForm(offset=1.0, rounds_first=False)-torch.float16",
    )
)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_norms_and_their_gradients_are_the_formula(interpreter, form, dtype):
    """Of rows of heads, too; the weight's gradient is a sum over all of them."""
    for shape, eps in (((5, 40), 1e-6), ((1, 3, 2, 24), 0.3)):
        tensors = drawn(shape, shape[-1:], dtype=dtype)
        got = interpreter("fused_norm", form, tensors, eps)
        want = of_form(form, tensors, eps)
        assert worst(got, want) < BOUND[dtype]
    other = NormForm(1 - form.offset, rounds_first=False)
    assert worst(got, of_form(other, tensors, eps)) > 0.1
    assert worst(got, of_form(form, tensors, 0.1)) > 0.02


def test_norms_round_where_the_stock_ones_do(interpreter):
    """In float16, bit for bit but for a few ties."""
    tensors = drawn((64, 64), (64,), dtype=torch.float16)
    for form in FORMS:
        got = interpreter("fused_norm", form, tensors, 1e-6)[0]
        share = {
            other: (got != other.eager(*tensors, 1e-6).double()).float().mean().item()
            for other in FORMS
        }
        assert share.pop(form) < 0.01
        assert min(share.values()) > 0.05


@pytest.mark.soak
def test_many_narrow_rows_take_another_kernel(interpreter):
    """liger's kernel for blocks of rows: from 32,768 rows of at most 256 columns, as of heads."""
    tensors = drawn((32768, 8), (8,))
    got = interpreter("fused_norm", FORMS[0], tensors, 1e-6)
    assert worst(got, of_form(FORMS[0], tensors, 1e-6)) < 1e-5


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


def of_rotation(tensors, grads, angles):
    """Outputs and gradients: columns i and i + R / 2 of a head are one complex number."""
    turn = torch.polar(torch.ones_like(angles).double(), angles.double())[:, :, None]
    width = angles.shape[-1]

    def turned(x, turn):
        first, second, rest = x.double().split((width, width, x.shape[-1] - 2 * width), dim=-1)
        number = torch.complex(first, second) * turn
        return torch.cat((number.real, number.imag, rest), dim=-1)

    return [*(turned(x, turn) for x in tensors), *(turned(x, turn.conj()) for x in grads)]


PACKED = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]])
"""Positions of three samples of a row."""
ROTATIONS = {
    "queries and keys": ((3, 1), 20, 20, PACKED),
    "a part of the head": ((2, 2), 24, 8, PACKED),
    "one of them": ((3,), 24, 24, PACKED),
    "two rows alike": ((4, 2), 16, 16, PACKED.repeat(2, 1)),
    "two rows of one positions": ((4, 2), 16, 16, PACKED),
    "two rows": ((2, 2), 16, 16, torch.stack((PACKED[0], PACKED[0].flip(0)))),
}
"""Heads, their columns, those that are rotated, positions; "alike" and "of one" are two rows."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_and_their_gradients_are_complex_products(interpreter, name, dtype):
    """Heads of queries and keys differ in number, as under grouped-query attention; nothing that
    the kernel is handed is written over."""
    heads, width, turned, positions = ROTATIONS[name]
    rows = 2 if name.startswith("two rows") else 1
    frequencies = 10.0 ** -torch.linspace(0, 1, turned // 2)
    angles = positions[..., None] * frequencies
    shapes = [(rows, positions.shape[1], count, width) for count in heads]
    tensors, grads = drawn(*shapes, dtype=dtype), drawn(*shapes, dtype=dtype)[::-1]
    if len(set(shapes)) > 1:
        grads = grads[::-1]
    cos, sin = (part.repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
    got, is_kept = interpreter("fused_rotate", tensors, grads, cos, sin, True)
    want = of_rotation(tensors, grads, angles)
    assert [x.dtype for x in got] == [dtype] * len(got)
    assert worst(got, want) < BOUND[dtype]
    assert is_kept
    runs_on = torch.arange(positions.shape[1])[None, :, None] * frequencies
    assert worst(got, of_rotation(tensors, grads, runs_on)) > 0.1, "positions restart"
    assert worst(got, of_rotation(tensors, grads, -angles)) > 0.1


def test_ligers_own_function_writes_over_what_it_is_handed(interpreter):
    """Which is why ours copies; a layer that recomputes all but its products would be handed the
    queries of its forward pass rotated."""
    shapes = (1, 8, 3, 16), (1, 8, 1, 16)
    tensors, angles = drawn(*shapes), PACKED[..., None] * torch.ones(8)
    cos, sin = (part.repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
    got, is_kept = interpreter("fused_rotate", tensors, drawn(*shapes), cos, sin, False)
    assert not is_kept
    assert worst(got, of_rotation(tensors, drawn(*shapes), angles)) < BOUND[torch.float32]


def test_the_installed_version_is_one_that_auto_takes(interpreter):
    assert interpreter("why_no_liger") == (None, None)
