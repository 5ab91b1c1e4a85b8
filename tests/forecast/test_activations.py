"""Bytes that layers keep, as estimated from sizes, beside those that autograd really keeps.

A training step of a hybrid in a process of its own: how far its memory rises, and the estimate.

    python test_activations.py MODEL_TYPE

Prints two integers, bytes: the rise of resident memory over what the process held after a step of a
few tokens, and the estimate of activations and logits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from support.engines import EVERYTHING, engine_of, make_stepper, single_rank
from support.families import tiny_family_folder
from support.hybrids import hybrid, packed_hidden, packing, row_params, samples
from support.kept import kept_bytes
from support.plans import mode_of
from support.recurrences import recurrent_sizes, segments
from support.samples import text_sample
from support.shards import ROOT

from vlmpack.encode import Encoder
from vlmpack.forecast import activations
from vlmpack.forecast.activations import (
    Forms,
    Numbers,
    Recurrences,
    forms_on,
    layer_bytes,
    recurrences_on,
    rule_bytes,
    state_lines,
)
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import LayerSizes, read_sizes
from vlmpack.packing import PackedBatch, pack_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recurrence import segment_delta_rule, segment_scan
from vlmpack.recurrence.rows import chunk_size

_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SIZES = {
    "qwen3_5_text": {
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "layers_block_type": ["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"],
    },
}
"""Large enough that activations are most of what a step takes: gigabytes."""
LENGTHS = (1024,) * 8


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def _batch(encoder: Encoder, lengths: tuple[int, ...]) -> PackedBatch:
    axes = encoder.family.num_position_axes
    samples = [
        text_sample(str(n), [i % 200 for i in range(length)], axes=axes, num_targets=length - 1)
        for n, length in enumerate(lengths)
    ]
    return pack_batch_sequences(samples, pad_token_id=encoder.pad_token_id)


def main(model_type: str, folder: Path) -> None:
    tiny_family_folder(model_type, folder)
    sizes = {"hidden_size": 256, "intermediate_size": 768, **_HEADS, **SIZES[model_type]}
    hybrid(model_type, **sizes).save_pretrained(folder)
    encoder = Encoder(folder)
    model = ModelSection(path=str(folder), dtype="float32", attention="segments")
    engine = engine_of(model, ParallelismSection(), encoder, single_rank(), EVERYTHING)
    stepper = make_stepper(engine)
    stepper.train(0, [_batch(encoder, (16, 16))], num_skipped=0, stop=False)
    held = [_resident()]
    done = Event()

    def watch() -> None:
        while not done.is_set():
            held.append(_resident())
            time.sleep(0.002)

    watching = Thread(target=watch)
    watching.start()
    stepper.train(1, [_batch(encoder, LENGTHS)], num_skipped=0, stop=False)
    done.set()
    watching.join()
    found = read_sizes(folder)
    assert found is not None
    figures = memory_figures(
        model,
        ParallelismSection(),
        found,
        mode_of(max_row_slots=sum(LENGTHS), max_row_patches=0),
        global_batch_size=16,
        world_size=1,
        forms=forms_on(torch.device("cpu"), model),
    )
    print(max(held) - held[0], figures.activations + figures.logits)


CPU = recurrences_on(torch.device("cpu"), ModelSection(path="here", dtype="float32"))


def of_torch(kind, total, keys, heads, key, value, dtype):
    """What the torch form keeps of a row of one segment beside its inputs."""

    def normal(*shape):
        return torch.randn(1, total, *shape, dtype=dtype, requires_grad=True)

    row = segments((total,))
    if kind == "delta_rule":
        decay = -torch.rand(1, total, heads)
        leaves = [normal(keys, key), normal(keys, key), normal(heads, value)]
        leaves += [decay.requires_grad_(), normal(heads)]
        return kept_bytes(lambda: segment_delta_rule(*leaves, row, normalize=True), leaves)
    a, skip = (torch.rand(heads, requires_grad=True) for _ in range(2))
    x, dt, b, c = normal(heads, value), normal(heads), normal(keys, key), normal(keys, key)
    leaves = [x, dt, a, b, c, skip]
    return kept_bytes(lambda: segment_scan(x, dt, -a, b, c, row, skip=skip), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(1, 4, 24, 40), (2, 4, 64, 16), (4, 8, 12, 20)], ids=str)
@pytest.mark.parametrize("kind", ["delta_rule", "scan"])
def test_what_the_torch_forms_keep(kind, heads, dtype):
    found = (of_torch(kind, 1024, *heads, dtype) - of_torch(kind, 512, *heads, dtype)) / 512
    expected = rule_bytes(recurrent_sizes(kind, *heads), dtype.itemsize, CPU)
    # Beside the formula lie a few numbers a head, which layers count with their steps.
    assert expected < found < expected + 48 * heads[1]
    assert CPU.chunk == chunk_size(torch.device("cpu"))


def engine_keeps(folder, low):
    """(bytes a token of the activations, estimated ones) of an engine over rows of 128 tokens."""
    encoder = Encoder(folder)
    dtype = "bfloat16" if low else "float32"
    model = ModelSection(path=str(folder), dtype=dtype, attention="segments")
    engine = engine_of(model, ParallelismSection(), encoder, single_rank(), EVERYTHING)
    found = []
    for count in (2, 6):
        each = [
            text_sample(str(n), list(range(128)), axes=encoder.family.num_position_axes)
            for n in range(count)
        ]
        batch = pack_batch_sequences(each, pad_token_id=encoder.pad_token_id)
        params = batch.packed_seq_params()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            found.append(
                kept_bytes(
                    lambda batch=batch, params=params: engine.module(batch, params).sum(),
                    engine.vlm.parameters(),
                )
            )
    figures = memory_figures(
        model,
        ParallelismSection(),
        read_sizes(folder),
        mode_of(max_row_slots=512, max_row_patches=0),
        global_batch_size=16,
        world_size=1,
        forms=forms_on(torch.device("cpu"), model),
    )
    return (found[1] - found[0]) / 512, figures.activations / 512


@pytest.mark.cases(slow="gemma4_text")
@pytest.mark.parametrize(
    "name",
    [
        "nemotron_h",
        "gemma4_text",
        "qwen3_5_moe_text",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen3_5", "gemma4-dense", "gemma4-mixture", "qwen3", "glm4_moe")
        ),
    ],
)
def test_what_tiny_models_keep(tmp_path, name):
    """Before layers were told apart these were 1.2 to 2.4 times the estimate."""
    folder = tiny_family_folder(name, tmp_path)
    found, estimated = engine_keeps(folder, low=False)
    assert 0.9 < found / estimated < 1.1
    found, estimated = engine_keeps(folder, low=True)
    assert 0.9 < found / estimated < 1.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        "olmo_hybrid",
        "lfm2",
        "lfm2_moe",
        "bamba",
        "granitemoehybrid",
        "falcon_h1",
        "zamba2",
        "mamba2",
    ],
)
def test_what_other_hybrids_keep(tmp_path, name):
    """Layers are known by their tensors alone: no family of these is asked."""
    model = hybrid(name)
    found = []
    for count in (2, 6):
        lengths = (128,) * count
        with packing(model):
            found.append(
                kept_bytes(
                    lambda lengths=lengths: packed_hidden(
                        model, samples(lengths), row_params(lengths)
                    ),
                    model.parameters(),
                )
            )
    model.save_pretrained(str(tmp_path))
    sizes = read_sizes(tmp_path)
    estimated = sum(
        sum(layer_bytes(x, sizes.hidden, Numbers(4, 12, 8), CPU)) for x in sizes.decoder
    )
    assert 0.9 < (found[1] - found[0]) / 512 / estimated < 1.1


@pytest.mark.soak
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h"])
def test_the_memory_of_a_process_over_a_step(model_type):
    """Gigabytes of a row of 8,192 tokens; temporaries and the allocator's habits are in it."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, model_type],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT))),
            # What is freed leaves the process.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr
    rise, estimate = map(int, ran.stdout.split())
    print(model_type, f"{rise / 2**20:,.0f} MiB, {rise / estimate:.2f} of the estimate")
    assert estimate > 2**30
    assert 0.8 < rise / estimate < 1.2


def test_what_a_recipe_asks_for_is_what_is_counted(monkeypatch):
    monkeypatch.setattr(activations, "packaged_kinds", lambda dtype: (str(dtype),))
    cuda, kinds = torch.device("cuda", 0), ("convolution", "delta_rule", "scan")
    for asked, expected in (("auto", ("torch.bfloat16",)), ("torch", ()), ("kernels", kinds)):
        model = ModelSection(path="here", dtype="bfloat16", recurrence=asked)
        assert recurrences_on(cuda, model) == Recurrences(64, expected)
        assert recurrences_on(torch.device("cpu"), model) == Recurrences(32)


FUSED = {
    ("none", "hf", "cuda"): (False, False),
    ("none", "mcore", "cuda"): (False, False),
    ("auto", "hf", "cuda"): (True, False),
    ("auto", "mcore", "cuda"): (True, True),
    ("auto", "mcore", "cpu"): (False, False),
    ("liger", "hf", "cuda"): (True, True),
    ("compile", "mcore", "cpu"): (True, True),
}
"""By `model.fused_layers`, engine and device, without liger: whether norms and activations are."""


def test_what_is_fused_where(monkeypatch):
    for (asked, backend, kind), (norms, activations_) in FUSED.items():
        model = ModelSection(path="here", dtype="bfloat16", backend=backend, fused_layers=asked)
        found = forms_on(torch.device(kind), model)
        assert (found.norms, found.activations, found.cuda) == (norms, activations_, kind == "cuda")
    assert Forms() == Forms(Recurrences(), norms=False, activations=False, cuda=True)
    monkeypatch.setattr("vlmpack.backends.fused.why_no_liger", lambda: None)
    found = forms_on(torch.device("cuda"), ModelSection(path="here", dtype="bfloat16"))
    assert found.norms and found.activations


def test_what_is_said_of_layers_that_carry_state():
    numbers, attention = Numbers(2, 10, 8), LayerSizes(query=64, key=64, mlp=128)
    assert state_lines([attention], 64, numbers, Recurrences()) == ()
    recurrent = LayerSizes(recurrent=recurrent_sizes("delta_rule", 2, 4, 24, 40), mlp=128)
    (line,) = state_lines([attention, recurrent], 64, numbers, Recurrences())
    kept = sum(layer_bytes(recurrent, 64, numbers, Recurrences()))
    kinds = ("convolution", "delta_rule", "scan")
    fewer = sum(layer_bytes(recurrent, 64, numbers, Recurrences(64, kinds)))
    assert fewer < kept / 2
    assert line == (
        f"a layer that carries state, by torch's operators: {kept:,} bytes a token; with "
        f"causal-conv1d and flash-linear-attention, for CUDA: {fewer:,}"
    )
    (line,) = state_lines([recurrent], 64, numbers, Recurrences(64, kinds))
    assert f"by a package's kernel: {fewer:,} bytes a token" in line


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1], Path(made))
