"""Fused parts of Megatron's layers: the flag for SwiGLU, and norms of ours, as the formulas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.engines import EVERYTHING, engine_of, make_stepper, single_rank
from support.layouts import LAYOUTS
from support.shards import TINY_MODEL
from support.token_losses import in_rows

from vlmpack.backends.fused import FusedOps
from vlmpack.backends.mcore.config import RMSNorm
from vlmpack.backends.mcore.engine import FusedParts, launch_queues
from vlmpack.backends.row_operators import WIDEST, rotated
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ModelSection, ParallelismSection

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.*is deprecated:FutureWarning",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)
CUDA = torch.device("cuda", 0)


def played(calls, *, offset=0.0, turn=1.0):
    def norm(x, weight, eps, form):
        calls.append("norm")
        return form.eager(x, weight + offset, eps)

    def rotate(tensors, cos, sin):
        calls.append("rotation")
        return [rotated(x, cos, turn * sin) for x in tensors]

    return FusedOps("played", "a test", norm=norm, rotate=rotate)


def trained(requested):
    """What a step reports, the weights after it, and the engine."""
    model = ModelSection(
        path=str(TINY_MODEL),
        backend="mcore",
        dtype="float32",
        attention="segments",
        fused_layers=requested,
    )
    parts = (Encoder(TINY_MODEL), single_rank(), EVERYTHING)
    engine = engine_of(model, ParallelismSection(), *parts)
    report, _ = make_stepper(engine).train(0, in_rows(LAYOUTS["one"]), num_skipped=0, stop=False)
    return (report.loss, report.grad_norm), dict(engine.whole_tensors()), engine


def test_a_row_too_wide_for_the_kernel_runs_by_torch():
    calls, config = [], SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False)
    x = torch.randn(2, WIDEST + 1)
    for width in (WIDEST, WIDEST + 1):
        norm = RMSNorm(config, width, ops=played(calls))
        found = norm(x[:, :width])
        assert torch.allclose(found, torch.rms_norm(x[:, :width], (width,), eps=1e-6), atol=1e-6)
    assert len(calls) == 1


@pytest.mark.slow
def test_a_step_is_the_one_without(monkeypatch):
    plain, weights, engine = trained("auto")
    said = engine.description["fused layers"]
    assert said.startswith("norms and rotations: none (Triton's kernels need a CUDA")
    assert not engine.model.config.bias_activation_fusion
    calls = []
    choose = "vlmpack.backends.mcore.engine.choose_fused"
    monkeypatch.setattr(choose, lambda *_: (played(calls), "a test"))
    found, others, engine = trained("compile")
    said = engine.description["fused layers"]
    assert said == "norms and rotations: played (a test); SwiGLU: Megatron's"
    assert engine.model.config.bias_activation_fusion
    norms = [module for module in engine.model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) > 3 and all(norm.ops is not None for norm in norms)
    rows, layers = len(in_rows(LAYOUTS["one"])), len(engine.model.gpt.decoder.layers)
    assert calls.count("norm") == len(norms) * rows
    assert calls.count("rotation") == layers * rows
    assert found == pytest.approx(plain, rel=1e-6)
    assert weights.keys() == others.keys()
    assert max((weights[n] - others[n]).abs().max().item() for n in weights) < 1e-5
    for fault in ({"offset": 1e-3}, {"turn": -1.0}):
        ops = played([], **fault)
        monkeypatch.setattr(choose, lambda *_, ops=ops: (ops, "a test"))
        wrong, _, _ = trained("compile")
        assert wrong != pytest.approx(plain, rel=1e-5), fault


def parts(requested, device, *, te=False):
    model = ModelSection(path="a", backend="mcore", fused_layers=requested)
    return FusedParts.of(model, device, transformer_engine=te)


def test_what_is_fused_where(monkeypatch):
    find = "vlmpack.backends.fused.find_spec"  # Triton may be installed or not
    monkeypatch.setattr(find, lambda _: None)
    found = parts("auto", CUDA)
    assert found.ops is None and found.activation and "Triton" in found.described
    monkeypatch.setattr(find, lambda _: "Triton")
    found = parts("auto", CUDA)
    assert found.ops is not None and found.activation
    assert found.described.startswith("norms and rotations: triton (first choice; no gated")
    assert "liger_kernel" in found.described and found.described.endswith("SwiGLU: Megatron's")
    said = "norms: Transformer Engine's; rotations: triton (first choice"
    assert parts("auto", CUDA, te=True).described.startswith(said)
    monkeypatch.undo()
    for off in (parts("none", CUDA), parts("auto", torch.device("cpu"))):
        assert off.ops is None and not off.activation and off.described.endswith("SwiGLU: none")
    with pytest.raises(CapabilityError, match=r"model\.fused_layers: liger cannot run"):
        parts("liger", CUDA)


@pytest.mark.parametrize(
    ("value", "said"), [(None, "not set; up to Hopper"), ("8", "8; up to Hopper"), ("1", "1")]
)
def test_the_log_says_whether_kernels_start_in_order(monkeypatch, value, said):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    for split in (ParallelismSection(tensor=2), ParallelismSection(context=2)):
        assert launch_queues(split, CUDA)["CUDA_DEVICE_MAX_CONNECTIONS"].startswith(said)
        assert launch_queues(split, torch.device("cpu")) == {}
    assert launch_queues(ParallelismSection(), CUDA) == {}
