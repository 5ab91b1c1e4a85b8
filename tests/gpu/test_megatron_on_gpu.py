"""The Megatron engine on CUDA: packed equals unpacked, and every layout equals one process.

Run on one H200 on 2026-11-26; without Transformer Engine, and on two GPUs never. What needs two
skips itself on one.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from support import layouts
from support.engines import make_engine, make_stepper, single_rank
from support.runs import mean_loss, pack
from support.token_losses import (
    TINY_MODEL,
    in_rows,
    labelled,
    make_megatron,
    merged,
    one_by_one,
    token_losses,
)

from vlmpack.attention import RopeLayout, apply_rope, rope_cos_sin
from vlmpack.encode import Encoder
from vlmpack.proof.measure import full_float32


def installed(module):
    return importlib.util.find_spec(module) is not None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
needs_megatron = pytest.mark.skipif(
    not installed("megatron"), reason="megatron-core is not installed"
)
needs_flash_attn = pytest.mark.skipif(
    not installed("flash_attn"), reason="flash-attn is not installed"
)
needs_te = pytest.mark.skipif(
    not installed("transformer_engine"), reason="transformer-engine is not installed"
)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

KERNELS = [
    "segments",
    "torch_varlen",
    pytest.param("flash_attn", marks=needs_flash_attn),
    pytest.param("transformer_engine", marks=needs_te),
]
TWO_GPUS = ["tp2", "cp2", "pp2", "dp2"]

MEAN_LOSS_TOLERANCE = 2e-2
"""Relative, per sample: five roundings of bfloat16's 8 bits."""
GRADIENT_NORM_TOLERANCE = 5e-2
"""Relative: a dozen roundings; one layer left out moves it by more."""
NOISE_RATIO = 1.1
"""Packed rows may be off by this much more than the same samples one by one, both in bfloat16."""


@pytest.fixture(scope="module", autouse=True)
def exact_float32():
    """No TF32: the vision tower begins with a convolution."""
    with pytest.MonkeyPatch.context() as patch, full_float32():
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # of processes that are started here
        yield


@pytest.fixture(scope="module")
def exact():
    """Losses of every token in float32, one by one, on the hf engine's CPU path."""
    engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL))
    with torch.no_grad():
        return {
            batch.keys[0]: engine.module(batch, batch.packed_seq_params()) for batch in one_by_one()
        }


def on_gpu(dtype, attention):
    ranks = replace(single_rank(), device=torch.device("cuda", 0))
    return make_megatron(layouts.LAYOUTS["one"], ranks, dtype, attention)


def noise(found, exact):
    """L2 of the errors of all label tokens."""
    assert found.keys() == exact.keys()
    return float(torch.cat([found[key] - exact[key] for key in exact]).double().norm())


@needs_megatron
@pytest.mark.parametrize("attention", KERNELS)
def test_packed_is_as_exact_as_one_by_one_in_bfloat16(attention, exact):
    engine = on_gpu("bfloat16", attention)
    assert engine.description["attention"].startswith(attention)
    packed = merged([token_losses(engine, in_rows(layouts.LAYOUTS["one"]))])
    unpacked = merged([token_losses(engine, one_by_one())])
    print(
        f"\n{attention}: packed {noise(packed, exact):.3f}, unpacked {noise(unpacked, exact):.3f}"
    )
    assert 0 < noise(packed, exact) <= NOISE_RATIO * noise(unpacked, exact)
    for key, losses in exact.items():
        expected = mean_loss(losses)
        assert mean_loss(packed[key]) == pytest.approx(expected, rel=MEAN_LOSS_TOLERANCE), key


@needs_megatron
@pytest.mark.parametrize("attention", KERNELS)
def test_a_step_in_bfloat16_has_the_reference_loss_and_gradient_norm(attention):
    rows = [pack(labelled()[start::4]) for start in range(4)]
    expected, _ = make_stepper(make_engine(TINY_MODEL, Encoder(TINY_MODEL))).train(
        0, rows, num_skipped=0, stop=False
    )
    found, _ = make_stepper(on_gpu("bfloat16", attention)).train(0, rows, num_skipped=0, stop=False)
    assert found.num_label_tokens == expected.num_label_tokens
    assert found.loss == pytest.approx(expected.loss, rel=MEAN_LOSS_TOLERANCE)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=GRADIENT_NORM_TOLERANCE)


@needs_megatron
def test_float32_steps_on_one_gpu_are_those_of_the_cpu():
    ranks = replace(single_rank(), device=torch.device("cuda", 0))
    trained, _ = layouts.run_layout("one", "sgd", ranks)
    found = layouts.Trained(trained.rows, {n: w.cpu() for n, w in trained.weights.items()})
    errors = layouts.worst_errors(found, layouts.train_reference("sgd"), layouts.start_weights())
    assert layouts.beyond_tolerance(errors) == {}


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    """The steps of all two-process layouts in float32, with segments."""
    folder = tmp_path_factory.mktemp("two")
    script = layouts.TESTS / "support" / "layouts.py"
    layouts.torchrun(script, 2, str(folder), ",".join(TWO_GPUS))
    return folder


@needs_megatron
@needs_two
@pytest.mark.parametrize("optimizer", layouts.OPTIMIZERS)
@pytest.mark.parametrize("name", TWO_GPUS)
def test_float32_steps_on_two_gpus_are_those_of_one_process(two_gpus, name, optimizer):
    found = layouts.Trained.load(two_gpus / f"{name}-{optimizer}")
    expected = layouts.train_reference(optimizer)
    errors = layouts.worst_errors(found, expected, layouts.start_weights())
    print(f"\n{name:6} {optimizer:6} " + "  ".join(f"{w} {e:.1e}" for w, e in errors.items()))
    assert layouts.beyond_tolerance(errors) == {}


@needs_megatron
@needs_two
@pytest.mark.parametrize(
    "attention", ["segments", pytest.param("transformer_engine", marks=needs_te)]
)
def test_bfloat16_layouts_are_as_exact_as_one_by_one(attention, exact, tmp_path):
    """Under CP, Transformer Engine's ring takes the place of our gathered keys and values."""
    script = layouts.TESTS / "support" / "token_losses.py"
    layouts.torchrun(script, 2, str(tmp_path), "bfloat16", attention, ",".join(TWO_GPUS))
    unpacked = noise(merged([token_losses(on_gpu("bfloat16", attention), one_by_one())]), exact)
    for name in TWO_GPUS:
        text = (tmp_path / f"{name}-{attention}-bfloat16.json").read_text(encoding="utf-8")
        losses = {key: torch.tensor(values) for key, values in json.loads(text).items()}
        print(f"\n{name} {attention}: {noise(losses, exact):.3f}, unpacked {unpacked:.3f}")
        assert noise(losses, exact) <= NOISE_RATIO * unpacked, name


@pytest.fixture
def no_host_sync():
    """torch raises where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sequences", [1, 16, 256])
def test_rope_waits_for_nothing(sequences, request):
    device = torch.device("cuda", 0)
    lengths = [8192 // sequences] * sequences
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1).to(device)
    inv_freq = (10000.0 ** (-torch.arange(0, 64) / 64)).to(device)
    query = torch.randn(8192, 8, 128, device=device, requires_grad=True)
    key = torch.randn(8192, 2, 128, device=device, requires_grad=True)
    request.getfixturevalue("no_host_sync")
    cos, sin = rope_cos_sin(positions, inv_freq, RopeLayout(mrope_section=(16, 24, 24)))
    rotated = apply_rope((query, key), cos, sin)
    torch.autograd.backward([part.square().sum() for part in rotated])


def test_a_host_sync_would_be_seen(no_host_sync):
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()
