"""Fused rotations of a transformers model: which are taken, and what they compute.

The kernel is played by the formula here; `tests/backends/test_row_kernels.py` runs it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import Counter

import pytest
import torch
from support.families import FAMILIES, tiny_family_folder
from torch import nn

from vlmpack.backends.fused import FusedOps
from vlmpack.backends.hf.fused_layers import fuse_layers
from vlmpack.backends.hf.fused_rotation import (
    Ran,
    fuse_rotations,
    repeats_halves,
    rotation_of,
)
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.row_operators import rotated

ROUNDS, WIDE = False, True
FUNCTIONS = {
    ("qwen2_5_vl", "apply_rotary_pos_emb"): (2, None, ROUNDS),
    ("qwen2_5_vl", "apply_rotary_pos_emb_vision"): (2, -2, WIDE),
    ("qwen3_5", "apply_rotary_pos_emb"): (2, None, ROUNDS),
    ("llama", "apply_rotary_pos_emb"): (2, None, ROUNDS),
    ("gemma3", "apply_rotary_pos_emb"): (2, None, ROUNDS),
    ("gemma4", "apply_rotary_pos_emb"): (1, None, ROUNDS),
    ("pixtral", "apply_rotary_pos_emb"): (2, None, ROUNDS),
    ("glm4_moe", "apply_rotary_pos_emb"): (2, None, ROUNDS),
    ("gemma4", "apply_multidimensional_rope"): None,
    ("glm4", "apply_rotary_pos_emb"): None,
    ("deepseek_v3", "apply_rotary_pos_emb_interleave"): None,
    ("gpt_oss", "apply_rotary_pos_emb"): None,
}
PACKED = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3])
"""Positions of three samples of a row."""


def played(calls=None):
    """The formula itself, which counts its calls."""

    def rotate(tensors, cos, sin, dtype):
        if calls is not None:
            calls.append(tuple(tensors[0].shape))
        return [rotated(x, cos, sin).to(dtype or x.dtype) for x in tensors]

    return FusedOps("played", "a test", rotate=rotate)


def modeling(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def angles(width, dtype=torch.float32):
    """(1, T, R) cos and sin of a packed row."""
    frequencies = 10.0 ** -torch.linspace(0, 1, width // 2)
    both = (PACKED[:, None] * frequencies).repeat(1, 2)[None]
    return both.cos().to(dtype), both.sin().to(dtype)


@pytest.mark.parametrize(("which", "form"), FUNCTIONS.items(), ids=str)
def test_functions_are_told_by_what_they_compute(which, form):
    function = getattr(modeling(which[0]), which[1])
    found = rotation_of(function)
    assert (None if found is None else (found.heads, found.dim, found.wide)) == form
    if found is None:
        return
    calls = []
    fused = found.fused(played(calls).rotate, Ran())
    draw = torch.Generator().manual_seed(1)
    width = 8 if which[0] in ("qwen3_5", "glm4_moe") else 16
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        cos, sin = angles(width, dtype)
        shapes = [(1, 9, heads, 16) for heads in (3, 1)[: found.heads]]
        heads = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
        told = {}
        if form[1] is None:  # heads in front of tokens, as most hand them over
            heads, told = [x.transpose(1, 2) for x in heads], {"unsqueeze_dim": 1}
        else:  # a row without an axis for it
            heads, cos, sin = [x[0] for x in heads], cos[0], sin[0]
        leaves = [x.requires_grad_() for x in heads]
        got, want = (f(*leaves, cos, sin, **told) for f in (fused, function))
        got, want = ([x] if isinstance(x, torch.Tensor) else x for x in (got, want))
        for mine, stock in zip(got, want, strict=True):
            assert mine.dtype == stock.dtype
            torch.testing.assert_close(mine, stock, rtol=bound, atol=bound)
        mine, stock = (
            torch.autograd.grad(sum(y.sin().sum() for y in x), leaves) for x in (got, want)
        )
        torch.testing.assert_close(mine, stock, rtol=5 * bound, atol=5 * bound)
    assert calls == [(1, 9, 3, 16)] * 2


def nearly(fault):
    """Llama's function with a fault."""

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        if fault == "the other way":
            sin = -sin
        out = []
        for x in (q, k) if fault != "queries alone" else (q,):
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
            if fault == "neighbours":
                turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
            out.append(x * cos + turned * sin)
        return (*out, k) if fault == "queries alone" else tuple(out)

    return rotate


def test_a_function_of_another_formula_is_left_alone():
    for fault in ("the other way", "neighbours", "queries alone"):
        assert rotation_of(nearly(fault)) is None, fault
    assert rotation_of(nearly("")).heads == 2


def test_calls_that_the_kernel_cannot_take_are_the_functions_own():
    calls, llama = [], modeling("llama").apply_rotary_pos_emb
    fused = rotation_of(llama).fused(played(calls).rotate, Ran())
    q, (cos, sin) = torch.randn(1, 3, 9, 16), angles(16)
    others = {
        "angles that are narrower than heads": (q, cos.bfloat16(), sin.bfloat16()),
        "angles of one token": (q, cos[:, :1], sin[:, :1]),
        "an axis in front of rows": (q[0, 0], cos[0], sin[0]),
    }
    for why, (x, cosines, sines) in others.items():
        for mine, stock in zip(
            fused(x, x, cosines, sines), llama(x, x, cosines, sines), strict=True
        ):
            assert torch.equal(mine, stock), why
    rows = torch.randn(2, 3, 9, 16)
    for q_and_k in ((q, rows), (rows, q)):  # the kernel would write past the shorter
        made = zip(fused(*q_and_k, cos, sin), llama(*q_and_k, cos, sin), strict=True)
        assert all(torch.equal(mine, stock) for mine, stock in made)
    assert calls == []
    under_autocast = fused(q.bfloat16(), q.bfloat16(), cos, sin)[0]
    assert under_autocast.dtype is torch.bfloat16 and len(calls) == 1
    stock = llama(q.bfloat16(), q.bfloat16(), cos, sin)[0]  # float32, which attention rounds
    assert torch.equal(under_autocast, stock.bfloat16())


def tiny(family, folder):
    return load_model(tiny_family_folder(family, folder))


LEFT = {
    "gemma4": {"Gemma4VisionAttention"},
    "glm4_moe_lite": {"Glm4MoeLiteAttention"},
    "deepseek_v3": {"DeepseekV3Attention"},
}
"""By family, classes that rotate by another formula: by height and width in halves of a head of
their own, or neighbours in the place of halves."""
NONE_AT_ALL = {"nemotron_h", "nemotron_h_omni"}


@pytest.mark.cases(slow=("qwen2_5_vl", "gemma4", "internvl"))
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_it_keeps(family, tmp_path):
    """Every module that takes angles is fused, or is named."""
    model = tiny(family, tmp_path)
    takers = Counter(
        type(module).__name__
        for module in model.modules()
        if any("rotary" in name or "rope" in name for name in _names(type(module).forward))
    )
    kept = LEFT.get(family.partition("-")[0], set())
    found = fuse_layers(model, played())
    rotating = {name: count for name, count in takers.items() if name.endswith("Attention")}
    assert kept <= rotating.keys()
    assert len(found.modules["rotations"]) == sum(
        n for name, n in rotating.items() if name not in kept
    )
    assert (not found.modules["rotations"]) == (family in NONE_AT_ALL or rotating.keys() <= kept)
    assert all(found.left[name] == rotating[name] for name in kept)
    fused = Counter(type(m).__name__ for m in model.modules())
    assert all(fused[f"Fused{name}"] == n for name, n in rotating.items() if name not in kept)


def _names(function):
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def test_a_tower_whose_angles_do_not_repeat_keeps_its_own(tmp_path):
    """Gemma 4's has height in the first half of a head and width in the second."""
    model = tiny("gemma4", tmp_path)
    answers = {
        type(part).__name__: repeats_halves(part)
        for part in model.modules()
        if any("inv_freq" in name for name, _ in part.named_buffers(recurse=False))
    }
    assert answers == {"Gemma4VisionRotaryEmbedding": False, "Gemma4TextRotaryEmbedding": True}

    class Strange(nn.Module):
        def forward(self, frames):
            return frames

    assert repeats_halves(Strange()) is None


class Rotary(nn.Module):
    """cos and sin of one axis; `repeats` or in pairs of neighbours."""

    def __init__(self, config):
        super().__init__()
        self.config, self.inv_freq = config, nn.Buffer(torch.arange(4.0), persistent=False)

    def forward(self, x, position_ids):
        angle = position_ids[..., None] * self.inv_freq
        angle = (
            angle.repeat(1, 1, 2) if self.config == "repeats" else angle.repeat_interleave(2, -1)
        )
        return angle.cos(), angle.sin()


apply_rotation = nearly("")


class Attention(nn.Module):
    def forward(self, x, cos, sin):
        return apply_rotation(x, x, cos, sin)


def renames(function):
    @functools.wraps(function)
    def inner(self, **given):
        return function(self, given.pop("old", given.pop("x", None)), **given)

    return inner


class Decorated(nn.Module):
    forward = renames(Attention.forward)


class Other(nn.Module):
    """Its decorator finds what it wraps by itself."""

    def forward(self, *given):
        return Attention.forward(self, *given)

    forward.__wrapped__ = Attention.forward


def fused_in(model, ops):
    """How many modules are fused, and which are not."""
    modules, left = fuse_rotations(model, ops, Ran())
    return len(modules), left


def decoder(config, attention=Attention):
    return nn.ModuleDict({"attention": attention(), "rotary": Rotary(config)})


def test_what_rotates_is_changed_in_the_model_alone():
    beside, model, calls = decoder("repeats"), decoder("repeats"), []
    assert fused_in(model, played(calls)) == (1, Counter())
    x, (cos, sin) = torch.randn(1, 2, 9, 16), angles(16)
    got, stock = (each["attention"](x, cos, sin)[0] for each in (model, beside))
    assert torch.allclose(got, stock, atol=1e-6) and len(calls) == 1
    assert type(model["attention"]).__name__ == "FusedAttention"
    assert isinstance(model["attention"], Attention)
    assert type(beside["attention"]) is Attention


def test_what_cannot_be_told_is_left_and_named():
    left = (0, Counter({"Attention": 1}))
    assert fused_in(decoder("neighbours"), played()) == left
    assert fused_in(nn.ModuleList([Attention()]), played()) == left, "nobody makes angles"
    towers = nn.ModuleDict({"text": decoder("repeats"), "tower": decoder("neighbours")})
    assert fused_in(towers, played()) == (1, Counter({"Attention": 1}))
    assert type(towers["text"]["attention"]).__name__ == "FusedAttention"
    named = (0, Counter({"Other": 1}))
    assert fused_in(decoder("repeats", Other), played()) == named


def test_a_decorator_that_renames_an_argument_stays_around_the_fused_forward():
    """transformers 5.24 puts one around every attention."""
    beside, model, calls = decoder("repeats", Decorated), decoder("repeats", Decorated), []
    assert fused_in(model, played(calls)) == (1, Counter())
    x, (cos, sin) = torch.randn(1, 2, 9, 16), angles(16)
    for name in ("old", "x"):
        got, stock = (e["attention"](**{name: x}, cos=cos, sin=sin)[0] for e in (model, beside))
        assert torch.allclose(got, stock, atol=1e-6)
    assert len(calls) == 2
