"""Fused norms and gated MLPs of a transformers model: which are taken, and what they compute.

On a CPU our operators are formulas; `tests/backends/test_row_kernels.py` runs their kernels.
liger's is played by a formula.
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
from vlmpack.backends.fused import ACTIVATIONS, FusedOps, compiled_gated
from vlmpack.backends.hf.fused_layers import (
    _FusedNorm,
    fuse_layers,
    mlp_activation,
    norm_form,
)
from vlmpack.backends.hf.fused_rotation import KINDS
from vlmpack.backends.row_operators import FORMS, WIDEST, NormForm, rms_norm
from vlmpack.backends.row_operators import rotate as rotate_heads
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.objective import SFT

CHOOSE = "vlmpack.backends.hf.engine.choose_fused"
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
    """Our operators and a formula, told apart by their counts."""
    calls = calls if calls is not None else []

    def norm(x, weight, eps, form, dtype):
        calls.append("norm")
        return rms_norm(x, weight, eps, form, dtype)

    def gated(gate, up, activation):
        calls.append("gated")
        return ACTIVATIONS[activation](gate) * up

    def rotate(tensors, cos, sin, dtype):
        calls.append("rotation")
        return rotate_heads(tensors, cos, sin, dtype)

    return FusedOps("played", "a test", gated, norm, rotate)


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
    assert not fuse_layers(holder, played()).modules["norms"] and type(holder[0]) is Wrong


@pytest.mark.parametrize("first", [64, WIDEST + 1])
def test_a_norm_too_wide_for_the_kernel_keeps_its_own_in_any_order(first):
    """Whichever of two norms of one class comes first in a model."""
    kind = norm_class("qwen3", "Qwen3RMSNorm")
    norms = nn.ModuleList([kind(first), kind(WIDEST + 65 - first)])
    (fused,) = fuse_layers(norms, played()).modules["norms"]
    assert fused.weight.numel() == 64


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
    found = fuse_layers(model, played())
    assert [len(found.modules[kind]) for kind in KINDS] == [1, 1, 0]
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
    assert plain.description["fused layers"].startswith("none (Triton's kernels need a CUDA")
    names = [name for name, _ in plain.vlm.model.named_parameters()]
    monkeypatch.setattr(CHOOSE, lambda *_: (played(calls), "a test"))
    engine = built(tiny_folder, encoder, "compile", activation_checkpointing=recompute)
    assert [name for name, _ in engine.vlm.model.named_parameters()] == names
    (losses, gradients), (others, expected) = step(engine, encoded), step(plain, encoded)
    assert {"norm", "gated", "rotation"} == set(calls)
    torch.testing.assert_close(losses, others, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-8, name


def test_adapters_and_frozen_parts_are_as_without(tiny_folder, encoder, encoded, monkeypatch):
    what = policy("frozen", "full", "lora")
    plain = built(tiny_folder, encoder, "none", what)
    monkeypatch.setattr(CHOOSE, lambda *_: (played(), "a test"))
    engine = built(tiny_folder, encoder, "compile", what)
    (losses, gradients), (others, expected) = step(engine, encoded), step(plain, encoded)
    torch.testing.assert_close(losses, others, rtol=1e-6, atol=1e-6)
    assert any("gate_proj.lora" in name for name in gradients)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-8, name


def counts_of(engine, samples, *, forward_only=False):
    """What the description says after a step."""
    batch = pack(samples)
    reports = engine.forward_backward(
        SFT.step_with(), iter([batch]), num_microbatches=1, forward_only=forward_only
    )
    assert len(reports) == 1
    return engine.description["fused layers"].removeprefix("played (a test): ")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_said_to_be_fused_is_what_the_first_step_ran(
    tiny_folder, encoder, encoded, monkeypatch, recompute
):
    """All of them with images; with a rotation that its kernel refuses, all others."""
    monkeypatch.setattr(CHOOSE, lambda *_: (played(), "a test"))
    engine = built(tiny_folder, encoder, "auto", activation_checkpointing=recompute)
    kinds = [type(module).__name__ for module in engine.vlm.model.modules()]
    norms, mlps = (sum(kind.endswith(end) for kind in kinds) for end in ("RMSNorm", "MLP"))
    rotations = sum(kind.endswith("Attention") for kind in kinds)
    assert min(norms, mlps, rotations) > 3
    assert counts_of(engine, encoded, forward_only=True) == "counted in the first step"
    said = counts_of(engine, encoded)
    assert said == f"{norms} norms, {mlps} gated MLPs, {rotations} rotations"
    hooks = [len(module._forward_pre_hooks) for module in engine.fused.modules["rotations"]]
    assert not any(hooks), "later steps run without"
    monkeypatch.setattr("vlmpack.backends.hf.fused_rotation._fits", lambda *_: False)
    refused = built(tiny_folder, encoder, "auto", activation_checkpointing=recompute)
    said = f"{norms} norms, {mlps} gated MLPs, 0 rotations; did not run: {rotations} rotations"
    assert counts_of(refused, encoded) == said
    refused.fused.ran.counted = False
    refused.fused.ran.modules["norms"].clear()
    language = refused.vlm.model.get_submodule(refused.paths.language)
    for module in language.modules():
        if isinstance(module, _FusedNorm):  # the stock forward
            monkeypatch.setattr(type(module), "forward", type(module).__mro__[2].forward)
    assert counts_of(refused, encoded).startswith("0 norms, ")


def test_a_norm_is_narrow_where_products_alone_read_it():
    """Under autocast, with the bits that a cast of the stock norm's output has."""
    kind = norm_class("qwen3", "Qwen3RMSNorm")

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm, self.mlp = kind(8), MLP()

        def forward(self, x):
            return x + self.mlp(self.input_layernorm(x))

    layer = Layer()
    model = nn.ModuleDict({"layer": layer, "norm": kind(8)})
    for norm in (layer.input_layernorm, model["norm"]):
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(3))
    own, calls = copy.deepcopy(model), []
    assert fuse_layers(model, played(calls)).narrowed == 1
    for x in (torch.randn(3, 8), torch.randn(3, 8).bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            made, stock = model["layer"].input_layernorm(x), own["layer"].input_layernorm(x)
            assert stock.dtype is torch.float32 and made.dtype is torch.bfloat16
            assert torch.equal(made, stock.bfloat16())
            assert torch.equal(model["norm"](x), own["norm"](x))
            assert torch.equal(model["layer"](x), own["layer"](x))
        assert model["layer"].input_layernorm(x).dtype is torch.float32
    assert calls.count("norm") == 8


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_torch_compiles_is_the_formula(activation):
    """Traced and differentiated by torch.compile, without its code generator."""
    gated = compiled_gated("aot_eager")
    for rows in (3, 9):
        gate, up = (torch.randn(rows, 16, requires_grad=True) for _ in range(2))
        made = gated(gate, up, activation), ACTIVATIONS[activation](gate) * up
        torch.testing.assert_close(*made, rtol=1e-6, atol=1e-6)
        found = (torch.autograd.grad(y.sin().sum(), (gate, up)) for y in made)
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.soak
def test_a_process_may_compile_many_variants_of_a_formula(monkeypatch):
    """More than the 8 that torch allows, after which it raises."""
    gated = compiled_gated("eager")

    def differs():
        for axes in range(1, 6):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                x = torch.randn(*[3] * axes, 16).to(dtype)
                assert torch.equal(gated(x, x, "silu"), nn.functional.silu(x) * x)

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
    "0.5.10": {"LigerSiLUMulFunction": "ctx, a, b", "LigerGELUMulFunction": "ctx, a, b"},
    "0.8.5": {
        "LigerSiLUMulFunction": "ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0",
        "LigerGELUMulFunction": "ctx, a, b",
    },
}
"""What forward functions of classes of these versions take, from the published sources."""


def published(version):
    """Classes of those signatures that give back what they were handed, by name."""
    made = {}
    for name, arguments in LIGER[version].items():
        forward = eval(f"lambda {arguments}: locals()")
        apply = partial(forward, None)
        members = {"forward": staticmethod(forward), "apply": staticmethod(apply)}
        made[name] = type(name, (), members)
    return made


@pytest.mark.parametrize("version", LIGER)
def test_what_is_taken_on_cuda(monkeypatch, version):
    """Norms and rotations need Triton alone; activations need liger, whose functions must fit."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(fused, "find_spec", lambda _: None)  # Triton may be installed or not
    ops, why = fused.choose_fused("auto", device)
    assert ops is None and "Triton" in why and "not installed" in why
    with pytest.raises(CapabilityError, match="need a CUDA device, this one is cpu"):
        fused.choose_fused("liger", torch.device("cpu"))
    assert fused.choose_fused("none", device) == (None, "as the recipe asks")
    monkeypatch.setattr(fused, "why_no_kernels", lambda _: None)
    ops, _ = fused.choose_fused("auto", device)
    assert ops.name == "triton" and ops.gated is None
    assert "cannot be imported" in ops.reason and "pip install liger-kernel" in ops.reason
    with pytest.raises(CapabilityError, match=r"model.fused_layers: liger cannot run: .*compile"):
        fused.choose_fused("liger", device)
    make = published(version)
    monkeypatch.setattr(fused, "_liger_function", lambda _, name: make[name])
    monkeypatch.setattr(fused.metadata, "version", lambda _: version)
    for asked, said in (("auto", "first choice"), ("liger", "as the recipe asks")):
        ops, _ = fused.choose_fused(asked, device)
        assert ops.reason == f"{said}; gated activations: liger {version}"
        assert (ops.name, ops.norm, ops.rotate) == ("triton", rms_norm, rotate_heads)
    for activation in ACTIVATIONS:
        taken = ops.gated("gate", "up", activation)
        assert (taken["a"], taken["b"], taken.get("gate_multiplier", 1.0)) == ("gate", "up", 1.0)
    make["LigerSiLUMulFunction"].forward = staticmethod(lambda ctx, x: 0)
    ops, _ = fused.choose_fused("auto", device)
    assert ops.gated is None
    assert "LigerSiLUMulFunction of the installed liger-kernel takes x" in ops.reason
