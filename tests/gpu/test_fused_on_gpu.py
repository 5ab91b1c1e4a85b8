"""Fused norms, activations and rotations on CUDA at widths of 3B and 7B models, as the formulas.

Activations ran on an H200 on 2026-11-26. Our kernels for norms and rotations have not run on a GPU
yet; `tests/backends` runs them by Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engines import EVERYTHING, engine_of, single_rank
from support.runs import mean_loss, pack, split_by_sample

from vlmpack.backends.fused import ACTIVATIONS, compiled_gated, liger_gated, why_no_liger
from vlmpack.backends.row_operators import FORMS, rms_norm, rotate, rotated
from vlmpack.packing import move_batch
from vlmpack.recipe.schema import ModelSection, ParallelismSection

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_liger = pytest.mark.skipif(why_no_liger() is not None, reason="needs liger-kernel")
OPS = ["compile", pytest.param("liger", marks=needs_liger)]
NARROW = torch.bfloat16
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""L2 of the error, relative: of float32 sums, and of bfloat16's 8 bits."""
LOSS_TOLERANCE = 2e-2
"""Relative, per sample: five roundings of bfloat16's 8 bits."""


def drawn(*shapes, dtype):
    draw = torch.Generator(DEVICE).manual_seed(0)
    return [
        torch.randn(shape, generator=draw, device=DEVICE).to(dtype).requires_grad_()
        for shape in shapes
    ]


def off_by(got, leaves, function):
    """Of the output and of each gradient, from the same in float64."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = function(*exact)
    weights = torch.linspace(0.5, 1.5, want.numel(), device=DEVICE).view(want.shape)
    mine = torch.autograd.grad((got * weights).sum(), leaves)
    theirs = torch.autograd.grad((want * weights).sum(), exact)
    pairs = zip((got, *mine), (want, *theirs), strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("made", [None, NARROW], ids=str)
@pytest.mark.parametrize("weight_dtype", BOUND, ids=str)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 8192, 2048), (1, 8192, 3584), (17776, 1280), (1, 8192, 28, 128), (1, 7, 80), (1, 0, 80)],
    ids=str,
)
def test_norms(dtype, weight_dtype, form, shape, made):
    (x,), (weight,) = drawn(shape, dtype=dtype), drawn(shape[-1:], dtype=weight_dtype)

    def exact(x, weight):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return normed * (form.offset + weight)

    got = rms_norm(x, weight, 1e-6, form, made)
    assert got.dtype is (made or form.dtype(x, weight))
    if got.numel():
        coarse = NARROW in (dtype, weight_dtype, made)
        assert off_by(got, (x, weight), exact) < BOUND[NARROW if coarse else torch.float32]
    else:
        assert not torch.autograd.grad(got.sum(), weight)[0].any()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("columns", [11008, 18944])
def test_gated_activations(name, dtype, activation, columns):
    leaves = drawn((1, 4096, columns), (1, 4096, columns), dtype=dtype)
    gated = compiled_gated() if name == "compile" else liger_gated()
    got = gated(*(1.0 * x for x in leaves), activation)
    assert off_by(got, leaves, lambda g, u: ACTIVATIONS[activation](g) * u) < BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("angles", BOUND, ids=str)
@pytest.mark.parametrize(("heads", "width", "turned"), [((28, 4), 128, 128), ((16, 2), 256, 64)])
def test_rotations(dtype, angles, heads, width, turned):
    """Of queries and keys of a row whose positions restart; angles are never narrower."""
    if torch.promote_types(dtype, angles) != angles:
        pytest.skip("engines keep the model's own there")
    leaves = drawn(*((1, 8192, count, width) for count in heads), dtype=dtype)
    positions = torch.arange(8192, device=DEVICE) % 3000
    frequencies = 10000.0 ** -torch.linspace(0, 1, turned // 2, device=DEVICE)
    angle = (positions[:, None] * frequencies).repeat(1, 2)[None]
    cos, sin = angle.cos().to(angles), angle.sin().to(angles)
    made = [1.0 * x for x in leaves]
    got = torch.cat(tuple(rotate(made, cos, sin)), dim=2)
    assert got.dtype is dtype
    assert all(torch.equal(a, b) for a, b in zip(made, leaves, strict=True)), "written over"

    def exact(*parts):
        return torch.cat([rotated(x, cos.double(), sin.double()) for x in parts], dim=2)

    assert off_by(got, leaves, exact) < BOUND[dtype]


@pytest.mark.parametrize("name", OPS)
def test_a_model_with_them_has_the_losses_of_the_one_without(tiny_folder, encoder, encoded, name):
    ranks = replace(single_rank(), device=DEVICE)
    found = {}
    for requested in ("none", name):
        model = ModelSection(path=str(tiny_folder), dtype="bfloat16", fused_layers=requested)
        engine = engine_of(model, ParallelismSection(), encoder, ranks, EVERYTHING)
        batch = move_batch(pack(encoded, alignment=8), DEVICE)
        with engine._autocast():
            losses = engine.module(batch, batch.packed_seq_params())
        losses.sum().backward()
        assert all(p.grad.isfinite().all() for _, p in engine.parameters())
        by_sample = split_by_sample(batch, losses.detach().cpu())
        found[requested] = {key: mean_loss(each) for key, each in by_sample.items()}
    assert engine.description["fused layers"].startswith(
        "compile" if name == "compile" else "triton"
    )
    for key, loss in found["none"].items():
        assert found[name][key] == pytest.approx(loss, rel=LOSS_TOLERANCE), key
