"""Stand-ins for packages of kernels, against the packages' own sources where these are."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import liger, stand_ins
from support.interpreted import FOLDER, why_not_installed

from vlmpack.backends.fused import ACTIVATIONS

MISSING = why_not_installed()
SOURCES = {
    "causal_conv1d_fn": "causal_conv1d/causal_conv1d_interface.py",
    "chunk_gated_delta_rule": "fla/ops/gated_delta_rule/chunk.py",
    "mamba_chunk_scan_combined": "mamba_ssm/ops/triton/ssd_combined.py",
    "flash_attn_varlen_func": "flash_attn/flash_attn_interface.py",
    "LigerSiLUMulFunction": "liger_kernel/ops/swiglu.py",
    "LigerGELUMulFunction": "liger_kernel/ops/geglu.py",
}


def taken(source, name):
    """Names and defaults of what a function takes, or the `forward` of a class."""
    (found,) = (node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    if isinstance(found, ast.ClassDef):
        (found,) = (node for node in found.body if getattr(node, "name", None) == "forward")
    arguments = found.args
    assert not arguments.kwonlyargs and not arguments.vararg
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return names, [ast.unparse(value) for value in arguments.defaults], bool(arguments.kwarg)


def stand_in(name):
    return next(members[name] for members in stand_ins.MODULES.values() if name in members)


def test_every_stand_in_is_compared():
    played = {name for members in stand_ins.MODULES.values() for name in members}
    assert played == SOURCES.keys()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(("name", "file"), SOURCES.items())
def test_signatures_are_the_published_ones(name, file):
    own = taken(inspect.getsource(inspect.getmodule(stand_in(name))), name)
    published = (FOLDER / file).read_text()
    assert own == taken(published, name)
    last = own[0][-1]
    assert own != taken(published.replace(last, f"{last}_of_another_version"), name)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_versions_are_those_that_are_wanted():
    stated = {path.name for path in FOLDER.glob("*.dist-info")}
    for name, version in stand_ins.VERSIONS.items():
        assert f"{name.replace('-', '_')}-{version}.dist-info" in stated


def gradients(function, tensors, saved):
    leaves = [x.clone().requires_grad_() for x in tensors]
    made = [1.0 * x for x in leaves]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = function(*made)
    weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def drawn(*shapes):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in shapes]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_the_formula_and_keep_gate_and_up(activation):
    tensors, saved = drawn((1, 5, 12), (1, 5, 12)), []
    names = {"silu": "LigerSiLUMulFunction", "gelu_tanh": "LigerGELUMulFunction"}
    got = gradients(getattr(liger, names[activation]).apply, tensors, saved)
    want = gradients(lambda gate, up: ACTIVATIONS[activation](gate) * up, tensors, [])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert len(saved) == 2


def test_a_tensor_of_the_cpu_is_refused_beside_a_device(monkeypatch):
    monkeypatch.setattr("fake_cuda.liger.is_open", lambda: True)
    with pytest.raises(RuntimeError, match="a kernel got a tensor of the CPU"):
        liger.LigerSiLUMulFunction.apply(*drawn((2, 3), (2, 3)))


def test_a_version_is_stated_while_it_is_installed():
    from importlib import metadata

    with stand_ins.installed(["liger_kernel.ops.swiglu"]):
        assert metadata.version("liger-kernel") == liger.VERSION
        assert torch.__version__.startswith(metadata.version("torch"))  # without a build's name
    assert SimpleNamespace(v=metadata.version).v("torch") == torch.__version__
