"""Fused norms and gated MLPs of a transformers model: which are taken, and what they compute.

liger's kernels are played by the formulas here; `tests/backends/test_fused_kernels.py` runs them.
"""

from __future__ import annotations

import copy
import importlib
from functools import partial

import pytest
import torch
from support.engines import EVERYTHING, engine_of, policy, single_rank
from support.runs import pack
from torch import nn
from transformers.activations import ACT2FN

from vlmpack.backends import fused
from vlmpack.backends.fused import (
    ACTIVATIONS,
    FORMS,
    FusedOps,
    NormForm,
    compiled_ops,
    rotated,
)
from vlmpack.backends.hf.fused_layers import fuse_layers, mlp_activation, norm_form
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ModelSection, ParallelismSection

LLAMA, GEMMA = NormForm(0.0, True), NormForm(1.0, False)
PLAIN_WIDE = NormForm(0.0, False)
CLASSES = {
    ("qwen2", "Qwen2RMSNorm"): LLAMA,
    ("qwen2_5_vl", "Qwen2_5_VLRMSNorm"): LLAMA,
    ("qwen3", "Qwen3RMSNorm"): LLAMA,
    ("qwen3_vl", "Qwen3VLTextRMSNorm"): LLAMA,
    ("llama", "LlamaRMSNorm"): LLAMA,
    ("pixtral", "PixtralRMSNorm"): LLAMA,
    ("internvl", "InternVLVisionRMSNorm"): LLAMA,
    ("qwen3_5", "Qwen3_5RMSNorm"): GEMMA,
    ("gemma3", "Gemma3RMSNorm"): GEMMA,
    ("gemma4", "Gemma4RMSNorm"): PLAIN_WIDE,
    ("nemotron_h", "NemotronHRMSNorm"): PLAIN_WIDE,
    ("qwen3_5", "Qwen3_5RMSNormGated"): None,
}


def norm_class(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def played(calls=None):
    """The formulas themselves, as operations that are told apart by their counts."""
    calls = calls if calls is not None else []

    def norm(x, weight, eps, form):
        calls.append("norm")
        return form.eager(x, weight, eps)

    def gated(gate, up, activation):
        calls.append("gated")
        return ACTIVATIONS[activation](gate) * up

    def rotate(tensors, cos, sin):
        calls.append("rotation")
        return [rotated(x, cos, sin) for x in tensors]

    return FusedOps("played", "a test", norm, gated, rotate)


@pytest.mark.parametrize(("which", "form"), CLASSES.items(), ids=str)
def test_norms_are_told_by_what_they_compute(which, form):
    module = norm_class(*which)(48, eps=3e-6)
    found = norm_form(module)
    assert found == (None if form is None else (form, 3e-6))
    if found is None:
        return
    own = copy.deepcopy(module)
    for parameter in (module.weight, own.weight):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    fuse_layers(module, played())
    assert type(module).__name__ == f"Fused{which[1]}" and isinstance(module, type(own))
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x = torch.randn(5, 48, generator=torch.Generator().manual_seed(4)).to(dtype)
        torch.testing.assert_close(module.to(dtype)(x), own.to(dtype)(x), rtol=bound, atol=1e-6)


class Wrong(nn.Module):
    """A norm that is nearly Llama's."""

    def __init__(self, fault):
        super().__init__()
        self.weight, self.eps, self.fault = nn.Parameter(torch.ones(48)), 1e-6, fault

    def forward(self, x):
        eps = 1e-5 if self.fault == "epsilon" else self.eps
        wide = x if self.fault == "no float32" else x.float()
        wide = wide - wide.mean(-1, keepdim=True) if self.fault == "mean" else wide
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        weight = self.weight.square() if self.fault == "weight" else self.weight
        return weight * wide.to(x.dtype)


@pytest.mark.parametrize("fault", ["epsilon", "no float32", "mean", "weight"])
def test_a_norm_of_another_formula_keeps_its_own(fault):
    assert norm_form(Wrong(fault)) is None
    assert norm_form(Wrong("")) == (LLAMA, 1e-6)
    holder = nn.Sequential(Wrong(fault))
    assert fuse_layers(holder, played()).norms == 0 and type(holder[0]) is Wrong


@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 8)])
def test_torch_has_one_kernel_for_its_own(module):
    assert norm_form(module) is None and mlp_activation(module) is None


class MLP(nn.Module):
    def __init__(self, act="silu", fault=""):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12)
        self.down_proj, self.act_fn, self.fault = nn.Linear(12, 8), ACT2FN[act], fault

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.fault == "swapped":
            gate, up = up, gate
        if self.fault == "scaled":
            gate = 1.1 * gate
        return self.down_proj(self.act_fn(gate) * up)


def test_gated_mlps_are_told_by_what_they_compute():
    assert mlp_activation(MLP()) == "silu"
    assert mlp_activation(MLP("gelu_pytorch_tanh")) == "gelu_tanh"
    for other in (MLP("gelu"), MLP("relu"), MLP(fault="swapped"), MLP(fault="scaled")):
        assert mlp_activation(other) is None
        assert fuse_layers(other, played()).left == {"MLP": 1}


def test_drawing_weights_leaves_the_generator_alone():
    model, before = nn.Sequential(MLP(), Wrong("")), torch.get_rng_state()
    assert fuse_layers(model, played()).described() == "1 norms, 1 gated MLPs, 0 rotations"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rounding_is_told_apart(form):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(16)), 1e-5

        def forward(self, x):
            return form.eager(x, self.weight, self.variance_epsilon)

    assert norm_form(Norm()) == (form, 1e-5)


def step(engine, encoded):
    """Losses and gradients."""
    batch = pack(encoded, alignment=1)
    engine.module.zero_grad()
    losses = engine.module(batch, batch.packed_seq_params())
    losses.sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in engine.parameters()}


def built(tiny_folder, encoder, requested, what=EVERYTHING, **others):
    model = ModelSection(
        path=str(tiny_folder),
        dtype="float32",
        attention="segments",
        fused_layers=requested,
        **others,
    )
    return engine_of(model, ParallelismSection(), encoder, single_rank(), what)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_engine_trains_as_without(tiny_folder, encoder, encoded, monkeypatch, recompute):
    calls = []
    plain = built(tiny_folder, encoder, "auto", activation_checkpointing=recompute)
    assert plain.description["fused layers"].startswith("none (liger's kernels need a CUDA device")
    names = [name for name, _ in plain.vlm.model.named_parameters()]
    monkeypatch.setattr("vlmpack.backends.fused.compiled_ops", lambda: played(calls))
    engine = built(tiny_folder, encoder, "compile", activation_checkpointing=recompute)
    kinds = [type(module).__name__ for module in plain.vlm.model.modules()]
    norms, mlps = (sum(kind.endswith(end) for kind in kinds) for end in ("RMSNorm", "MLP"))
    rotations = sum(kind.endswith("Attention") for kind in kinds)
    said = f"played (a test): {norms} norms, {mlps} gated MLPs, {rotations} rotations"
    assert engine.description["fused layers"] == said and min(norms, mlps, rotations) > 3
    assert [name for name, _ in engine.vlm.model.named_parameters()] == names
    (losses, gradients), (others, expected) = step(engine, encoded), step(plain, encoded)
    assert {"norm", "gated", "rotation"} == set(calls)
    torch.testing.assert_close(losses, others, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-8, name


def test_adapters_and_frozen_parts_are_as_without(tiny_folder, encoder, encoded, monkeypatch):
    what = policy("frozen", "full", "lora")
    plain = built(tiny_folder, encoder, "none", what)
    monkeypatch.setattr("vlmpack.backends.fused.compiled_ops", played)
    engine = built(tiny_folder, encoder, "compile", what)
    (losses, gradients), (others, expected) = step(engine, encoded), step(plain, encoded)
    torch.testing.assert_close(losses, others, rtol=1e-6, atol=1e-6)
    assert any("gate_proj.lora" in name for name in gradients)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-8, name


def test_a_norm_under_autocast_widens_as_the_stock_one():
    own = norm_class("qwen3", "Qwen3RMSNorm")(16)
    module, calls = copy.deepcopy(own), []
    fuse_layers(module, played(calls))
    x = torch.randn(3, 16).bfloat16()
    assert torch.equal(module(x), own(x)) and module(x).dtype is torch.float32
    assert calls == []
    assert module(x.float()).dtype is torch.float32 and calls == ["norm"]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("form", [LLAMA, GEMMA], ids=str)
def test_what_torch_compiles_is_the_formula(form):
    """Traced and differentiated by torch.compile, without its code generator."""
    ops = compiled_ops(backend="aot_eager")
    for rows in (3, 9):
        x, weight = torch.randn(rows, 16, requires_grad=True), torch.randn(16, requires_grad=True)
        heads, angle = x[None, :, :, None].expand(-1, -1, -1, 6), torch.randn(1, rows, 4)
        for mine, plain in (
            (ops.norm(x, weight, 1e-6, form), form.eager(x, weight, 1e-6)),
            (ops.gated(x, x + 1, "silu"), nn.functional.silu(x) * (x + 1)),
            (ops.rotate([heads], angle, angle + 1)[0], rotated(heads, angle, angle + 1)),
        ):
            torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-6)
            wanted = [t for t in (x, weight) if plain is not None]
            got, want = (
                torch.autograd.grad(y.sin().sum(), wanted, allow_unused=True) for y in (mine, plain)
            )
            for a, b in zip(got, want, strict=True):
                assert (a is None) is (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.soak
def test_a_process_may_compile_many_variants_of_a_formula(monkeypatch):
    """More than the 8 that torch allows, after which it raises."""
    ops = compiled_ops(backend="eager")

    def differs():
        for axes in range(1, 6):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                x, weight = torch.randn(*[3] * axes, 16).to(dtype), torch.randn(16)
                assert torch.equal(ops.norm(x, weight, 1e-6, LLAMA), LLAMA.eager(x, weight, 1e-6))

    torch.compiler.reset()
    differs()
    monkeypatch.setattr(fused, "VARIANTS", 8)
    fused._compiled.cache_clear()
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        differs()
    fused._compiled.cache_clear()
    torch.compiler.reset()


LIGER = {
    "0.5.10": {
        "LigerRMSNormFunction": "ctx, X, W, eps, offset=0.0, casting_mode='llama', in_place=True",
        "LigerSiLUMulFunction": "ctx, a, b",
        "LigerGELUMulFunction": "ctx, a, b",
        "rope_forward": "q, k, cos, sin",
        "rope_backward": "dq, dk, cos, sin",
    },
    "0.8.5": {
        "LigerRMSNormFunction": "ctx, X, W, eps, offset=0.0, casting_mode='llama', in_place=True, "
        "row_mode=None",
        "LigerSiLUMulFunction": "ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0",
        "LigerGELUMulFunction": "ctx, a, b",
        "rope_forward": "q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None",
        "rope_backward": "dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None",
    },
}
"""What functions, and the forward functions of classes, of these versions take, from the published
sources."""


def published(version):
    """Functions of those signatures that give back what they were handed, by name."""
    made = {}
    for name, arguments in LIGER[version].items():
        forward = eval(f"lambda {arguments}: locals()")
        if name.startswith("rope"):
            made[name] = forward
            continue
        apply = partial(forward, None)
        members = {"forward": staticmethod(forward), "apply": staticmethod(apply)}
        made[name] = type(name, (), members)
    return made


@pytest.mark.parametrize("version", LIGER)
def test_liger_is_taken_on_cuda_where_its_functions_fit(monkeypatch, version):
    device = torch.device("cuda", 0)
    ops, why = fused.choose_fused("auto", device)
    assert ops is None and "cannot be imported" in why and "pip install liger-kernel" in why
    with pytest.raises(CapabilityError, match=r"model.fused_layers: liger cannot run: .*compile"):
        fused.choose_fused("liger", device)
    with pytest.raises(CapabilityError, match="need a CUDA device, this one is cpu"):
        fused.choose_fused("liger", torch.device("cpu"))
    assert fused.choose_fused("none", device) == (None, "as the recipe asks")
    make = published(version)
    monkeypatch.setattr(fused, "_liger_function", lambda _, name: make[name])
    monkeypatch.setattr(fused.metadata, "version", lambda _: version)
    ops, _ = fused.choose_fused("auto", device)
    reason = f"{version}, first choice"
    if version == "0.5.10":  # rotates whole heads, whatever the width of cos
        assert ops.rotate is None
        reason += "; no rotations: its rope_forward takes no rotary_dim, as that of liger-kernel"
    else:
        assert ops.rotate is fused.liger_rotate
    assert ops.name == "liger" and ops.reason.startswith(reason)
    for form in FORMS:
        taken = ops.norm("x", "w", 1e-6, form)
        assert (taken["X"], taken["W"], taken["eps"], taken["offset"]) == (
            *("x", "w", 1e-6),
            form.offset,
        )
        assert taken["casting_mode"] == ("llama" if form.rounds_first else "gemma")
        assert taken["in_place"] is False, "it would write into a gradient that others read"
    for activation in ACTIVATIONS:
        taken = ops.gated("gate", "up", activation)
        assert (taken["a"], taken["b"], taken.get("gate_multiplier", 1.0)) == ("gate", "up", 1.0)
    make["LigerSiLUMulFunction"].forward = staticmethod(lambda ctx, x: 0)
    ops, why = fused.choose_fused("auto", device)
    assert ops is None and why.startswith(
        "LigerSiLUMulFunction of the installed liger-kernel takes x"
    )
