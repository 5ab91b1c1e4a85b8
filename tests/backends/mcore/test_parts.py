"""RMSNorm, Megatron on a CPU, and the sizes that must divide."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.shards import TINY_MODEL
from transformers import AutoConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from vlmpack.backends.mcore.config import RMSNorm
from vlmpack.backends.mcore.groups import megatron_on_cpu
from vlmpack.backends.mcore.weights import megatron_family
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ParallelismSection


def norms(dtype, *, sequence_parallel=False):
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=sequence_parallel)
    ours, theirs = RMSNorm(config, 64, eps=1e-5), Qwen2RMSNorm(64, eps=1e-5).to(dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(64, generator=draw))
        theirs.weight.copy_(ours.weight)
    return ours, theirs, torch.randn(7, 3, 64, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_bits_of_transformers(dtype):
    ours, theirs, x = norms(dtype)
    results = []
    for norm in (ours, theirs):
        inputs = x.clone().requires_grad_()
        output = norm(inputs)
        gradients = torch.autograd.grad(output.float().square().sum(), (inputs, norm.weight))
        results.append((output.detach(), *gradients))
    for mine, other in zip(*results, strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, other)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rms_norm_carries_the_flag(sequence_parallel):
    ours, _, _ = norms(torch.float32, sequence_parallel=sequence_parallel)
    assert ours.weight.sequence_parallel is sequence_parallel


FAMILY = megatron_family("qwen2_5_vl")
WATCHED = ("current_device", "synchronize", "manual_seed", "get_rng_state")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched there")


def snapshot():
    from megatron.core.tensor_parallel import random

    patched = [getattr(torch.cuda, name) for name in WATCHED]
    return [*patched, random._get_cuda_rng_state, random._set_cuda_rng_state]


@without_cuda
def test_cuda_means_cpu_inside_the_context_alone():
    before = snapshot()
    with megatron_on_cpu():
        assert not set(map(id, before)) & set(map(id, snapshot()))
        assert torch.cuda.current_device() == torch.device("cpu")
        for device in ("cuda", "cuda:0", torch.device("cuda"), torch.cuda.current_device()):
            assert torch.zeros(2, device=device).device.type == "cpu"
        x = torch.ones(2)
        assert x.cuda() is x
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.type(torch.float64).dtype == torch.float64
        torch.cuda.synchronize()
        torch.cuda.manual_seed(0)
        assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())
        with megatron_on_cpu():
            assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.cuda.current_device() == torch.device("cpu"), "the inner one ended the outer"
    assert snapshot() == before
    assert torch.ones(2).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


@without_cuda
def test_an_error_inside_restores_everything():
    before = snapshot()
    with pytest.raises(KeyError), megatron_on_cpu(), megatron_on_cpu():
        raise KeyError("inside")
    assert snapshot() == before
    with megatron_on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu"), "the depth was not counted back"
    assert snapshot() == before


def test_where_there_is_cuda_nothing_is_patched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = snapshot()
    with megatron_on_cpu():
        assert snapshot() == before
        assert torch.ones(2).type() == "torch.FloatTensor"


@without_cuda
def test_importing_the_engine_patches_nothing():
    import vlmpack.backends.mcore.engine  # noqa: F401

    for name in WATCHED:
        assert getattr(torch.cuda, name).__module__.startswith("torch.cuda")
    assert torch.ones(1).type() == "torch.FloatTensor"


@pytest.fixture(scope="module")
def config():
    return AutoConfig.from_pretrained(str(TINY_MODEL), local_files_only=True)


def test_dims_of_the_tiny_model(config):
    from vlmpack.backends.mcore.weights.dims import LanguageDims

    dims = LanguageDims.from_transformers(config, FAMILY)
    assert (dims.layers, dims.hidden, dims.heads, dims.groups, dims.head_dim) == (4, 128, 4, 2, 32)
    assert (dims.intermediate, dims.vocabulary, dims.tied) == (384, 576, True)
    assert dims.rope.mrope_section == (2, 2, 12)
    expected = 200.0 ** (-torch.arange(0, 32, 2).double() / 32)
    found = dims.inv_freq
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        (
            {},
            {"tensor": 3},
            "parallelism.tensor: 3 does not divide num_attention_heads 4 .*; sizes that do: 1, 2",
        ),
        ({}, {"tensor": 4}, "parallelism.tensor: 4 .* num_key_value_heads 2 of the model"),
        ({"intermediate": 385}, {"tensor": 2}, "parallelism.tensor: 2 .* intermediate_size 385"),
        ({}, {"pipeline": 3}, "parallelism.pipeline: 3 .* num_hidden_layers 4"),
    ],
)
def test_sizes_that_do_not_divide_name_both_numbers(config, changes, sizes, message):
    from vlmpack.backends.mcore.weights.dims import LanguageDims

    dims = LanguageDims.from_transformers(config, FAMILY)
    dims.check(ParallelismSection(tensor=2, pipeline=4, context=7))
    with pytest.raises(CapabilityError, match=message):
        replace(dims, **changes).check(ParallelismSection(**sizes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type 'yarn'"),
    ],
)
def test_what_the_engine_does_not_build_is_refused(change, message):
    from vlmpack.backends.mcore.weights.dims import LanguageDims

    config = AutoConfig.from_pretrained(str(TINY_MODEL), local_files_only=True)
    text = config.get_text_config()
    for name, value in change.items():
        setattr(text, name, value)
    with pytest.raises(CapabilityError, match=message):
        LanguageDims.from_transformers(config, FAMILY)


def test_llama_3_frequencies_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from vlmpack.backends.mcore.weights.dims import inverse_frequencies

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    cpu = torch.device("cpu")
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(rope_parameters=rope), cpu)
    ours = inverse_frequencies(rope, 128)
    plain = inverse_frequencies({"rope_theta": 500000.0}, 128)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    ratios = ours / plain
    assert factor == 1.0
    assert (ratios == 1.0).any()
    assert (ratios == 1 / 32).any()
    assert ((ratios > 1 / 31) & (ratios < 0.99)).any(), "nothing was interpolated"


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "rows"), [(576, 2, 576), (577, 2, 578), (5, 4, 8)]
)
def test_the_vocabulary_is_padded_to_equal_shares(config, vocabulary, tensor, rows):
    from vlmpack.backends.mcore.config import padded_vocabulary
    from vlmpack.backends.mcore.weights.dims import LanguageDims

    dims = replace(LanguageDims.from_transformers(config, FAMILY), vocabulary=vocabulary)
    assert padded_vocabulary(dims, ParallelismSection(tensor=tensor)) == rows
