"""Our Triton kernels of norms and rotations: run by Triton's interpreter on a CPU, against the
formulas in float64. All of ours are compiled for GPUs that are not there. `make kernels` installs
Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from support.interpreted import FOLDER, Interpreter, why_not_installed
from support.recurrences import worst
from support.shards import ROOT

from vlmpack.backends.row_operators import FORMS, WIDEST, NormForm

MISSING = why_not_installed()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
LOW, HIGH = torch.bfloat16, torch.float32
BOUND = {HIGH: 1e-6, LOW: 6e-3}
"""Relative to the largest entry: of float32, and of one or two roundings to bfloat16's 8 bits."""


@pytest.fixture(scope="module")
def interpreter():
    process = Interpreter("fused")
    yield process
    process.close()


def drawn(*shapes, dtype=HIGH):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def of_form(form, tensors, eps, grad):
    """Output and gradients in float64."""
    x, weight = leaves = [x.double().requires_grad_() for x in tensors]
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    out = normed * (form.offset + weight)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


KINDS = {
    "bfloat16": (LOW, LOW, None, LOW),
    "tower's": (LOW, HIGH, None, HIGH),
    "tower's, narrow": (LOW, HIGH, LOW, LOW),
    "residual": (HIGH, HIGH, None, HIGH),
    "residual, narrow": (HIGH, HIGH, LOW, LOW),
    "frozen weight": (HIGH, LOW, LOW, LOW),
}
"""dtypes of x, of the weight, that is asked for, and of the output; without one, stock's."""
SHAPES = [(1, 80), (7, 80), (300, 80), (1, 128), (7, 128), (300, 128), (1, 7, 3, 48)]
WIDE = [(rows, width) for width in (1280, 2048, 3584) for rows in (1, 7, 300)]


@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.soak) for s in WIDE)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_norms_and_their_gradients_are_the_formula(interpreter, form, kind, shape):
    """The weight's gradient is a sum over all rows, in float32 whatever it multiplies."""
    x_dtype, weight_dtype, asked, made = KINDS[kind]
    if not form.rounds_first and asked is None:
        made = x_dtype
    (x,), (weight,) = drawn(shape, dtype=x_dtype), drawn(shape[-1:], dtype=weight_dtype)
    (grad,) = drawn(shape[::-1], dtype=made)
    grad = grad.reshape(shape)
    got = interpreter("row_norm", form, [x, weight], 1e-6, asked, grad)
    assert [part.dtype for part in got] == [made, x_dtype, weight_dtype]
    want = of_form(form, [x, weight], 1e-6, grad)
    for mine, theirs, rounded in zip(got, want, (made, x_dtype, weight_dtype), strict=True):
        narrow = LOW in (rounded, x_dtype if form.rounds_first else rounded)
        assert worst([mine], [theirs]) < BOUND[LOW if narrow else HIGH]
    other = NormForm(1 - form.offset, rounds_first=False)
    assert worst(got, of_form(other, [x, weight], 1e-6, grad)) > 0.1
    assert worst(got, of_form(form, [x, weight], 0.5, grad)) > 0.02


def test_norms_round_where_the_stock_ones_do(interpreter):
    """Bit for bit but for a few ties, with a float32 weight too."""
    (x,), (weight, grad) = drawn((64, 64), dtype=LOW), drawn((64,), (64, 64))
    for asked in (None, LOW):
        for form in FORMS:
            made = asked or form.dtype(x, weight)
            got = interpreter("row_norm", form, [x, weight], 1e-6, asked, grad.to(made))[0]
            share = {
                other: (got != other.eager(x, weight, 1e-6).to(made)).float().mean().item()
                for other in FORMS
            }
            assert share.pop(form) < 0.01
            assert min(share.values()) > 0.05


def test_rows_may_lie_apart_and_there_may_be_none(interpreter):
    """As queries beside a gate do; memory that a kernel leaves out would hold NaN."""
    (both,), (weight,) = drawn((1, 7, 3, 96)), drawn((48,))
    x, grad = both.chunk(2, dim=-1)
    assert not x.is_contiguous()
    got = interpreter("row_norm", FORMS[0], [x, weight], 1e-6, None, grad)
    assert worst(got, of_form(FORMS[0], [x, weight], 1e-6, grad)) < BOUND[HIGH]
    none = interpreter("row_norm", FORMS[0], [x[:, :0], weight], 1e-6, LOW, grad[:, :0].to(LOW))
    assert [tuple(part.shape) for part in none] == [(1, 0, 3, 48), (1, 0, 3, 48), (48,)]
    assert not none[2].any()


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
    "more than a program": ((40, 30), 80, 80, PACKED),
    "two rows alike": ((4, 2), 16, 16, PACKED.repeat(2, 1)),
    "two rows of one positions": ((4, 2), 16, 16, PACKED),
    "two rows": ((2, 2), 16, 16, torch.stack((PACKED[0], PACKED[0].flip(0)))),
}
"""Heads, their columns, those that are rotated, positions; "alike" and "of one" are two rows."""


@pytest.mark.parametrize("made", [None, LOW], ids=str)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_and_their_gradients_are_complex_products(interpreter, name, dtype, made):
    """Heads of queries and keys differ in number, as under grouped-query attention, and lie before
    the tokens; nothing that the kernel is handed is written over."""
    heads, width, turned, positions = ROTATIONS[name]
    rows = 2 if name.startswith("two rows") else 1
    angles = positions[..., None] * 10.0 ** -torch.linspace(0, 1, turned // 2)
    shapes = [(rows, count, positions.shape[1], width) for count in heads]
    tensors = [x.transpose(1, 2) for x in drawn(*shapes, dtype=dtype)]
    grads = [x.transpose(1, 2) for x in drawn(*shapes[::-1], dtype=made or dtype)[::-1]]
    cos, sin = (part.repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
    got, is_kept = interpreter("row_rotation", tensors, grads, cos, sin, made)
    assert [x.dtype for x in got] == [made or dtype] * len(heads) + [dtype] * len(heads)
    want = of_rotation(tensors, grads, angles)
    bound = BOUND[LOW if LOW in (dtype, made) else HIGH]
    assert worst(got, want) < bound
    assert is_kept
    runs_on = torch.arange(positions.shape[1])[None, :, None] * angles[:1, 1:2]
    assert worst(got, of_rotation(tensors, grads, runs_on)) > 0.1, "positions restart"
    assert worst(got, of_rotation(tensors, grads, -angles)) > 0.1


def test_what_a_kernel_would_write_past_is_refused(interpreter):
    """Rows wider than registers hold, and keys of other tokens or rows than the queries."""
    (x,), (weight,) = drawn((1, WIDEST + 1)), drawn((WIDEST + 1,))
    with pytest.raises(RuntimeError, match=rf"{WIDEST + 1} columns, the kernel takes {WIDEST}"):
        interpreter("row_norm", FORMS[0], [x, weight], 1e-6, None, x)
    cos = torch.ones(1, 8, 16)
    for shape in ((2, 8, 1, 16), (1, 9, 1, 16), (1, 8, 1, 20)):
        q, k = torch.ones(1, 8, 2, 16), torch.ones(shape)
        with pytest.raises(RuntimeError, match="AssertionError"):
            interpreter("row_rotation", [q, k], [q, k], cos, cos, None)


def test_heads_may_lie_more_than_2_to_the_31_elements_apart(interpreter):
    """As of long rows whose heads lie before tokens: their offsets have 64 bits."""
    assert interpreter("far_heads", 3 << 29) == [0.0, 1.0, 2.0]


def test_the_installed_versions_are_ones_that_auto_takes(interpreter):
    assert interpreter("why_no_kernels") == (None, None)


SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10}
"""Bytes that a program may have on these."""
REGISTERS = 65536
"""Of a multiprocessor."""
SPILLED = {"wide_backward_keys 512": 56, "wide_backward_keys 320": 28}
"""Bytes of a thread that lie in memory instead, by kernel and width; 0 of the others. Smaller tiles
spill none, and read queries twice as often."""


def test_every_kernel_compiles_for_gpus(tmp_path):
    """For every width and dtype that is launched, with no more spilled registers than are listed,
    and so that a program fits."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (FOLDER, ROOT / "tests", ROOT))),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "support.compiled_kernels", *SHARED]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for gpu, kernels in found.items():
        assert len(kernels) > 50
        for name, said in kernels.items():
            assert said["shared"] <= SHARED[gpu], (gpu, name)
            listed = SPILLED.get(" ".join(name.split()[:2]), 0)
            assert said["spilled"] <= listed, (gpu, name)
            assert said["registers"] * said["threads"] <= REGISTERS, (gpu, name)
