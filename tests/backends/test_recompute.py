"""Activation checkpointing on both engines: the same numbers, and fewer bytes by what plan says."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.alive import Alive
from support.engines import EVERYTHING, engine_of, make_engine, policy, single_rank
from support.families import FAMILIES, tiny_family_folder
from support.layouts import samples
from support.plans import mode_of
from support.samples import text_sample
from support.shards import TINY_MODEL
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers.modeling_layers import GradientCheckpointingLayer

from vlmpack.attention.wide import wide_attention
from vlmpack.backends import recompute
from vlmpack.backends.recompute import draws_random_numbers, recompute_layers, recompute_modules
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.packing import pack_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.objective import SFT

VALUES: tuple[Any, ...] = ("none", "selective", 2, "full")
ON_MEGATRON = [
    pytest.mark.megatron,
    pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core"),
]
ENGINES = [
    ("hf", "float32"),
    ("hf", "bfloat16"),
    pytest.param("mcore", "float32", marks=ON_MEGATRON),
    pytest.param("mcore", "bfloat16", marks=ON_MEGATRON),
]


def section(value: Any, backend: str = "hf", dtype: str = "float32") -> ModelSection:
    """The tiny model with a value of the knob; four layers, four blocks in its tower."""
    return ModelSection.model_validate(
        {
            "path": str(TINY_MODEL),
            "backend": backend,
            "dtype": dtype,
            "attention": "segments",
            "activation_checkpointing": value,
        }
    )


def one_pass(model: ModelSection, encoder: Any, samples: Any) -> tuple[Any, dict[str, Any], Alive]:
    """Losses, gradients, and the bytes that were alive in between."""
    engine = engine_of(model, ParallelismSection(), encoder, single_rank(), EVERYTHING)
    return losses_of(engine, model, encoder, samples)


def losses_of(engine: Any, model: ModelSection, encoder: Any, samples: Any) -> Any:
    """The same of an engine that is built."""
    batch = pack_batch_sequences(samples, pad_token_id=encoder.pad_token_id)
    params, around = batch.packed_seq_params(), nullcontext()
    module = engine.module.train()
    if model.backend == "mcore":
        from vlmpack.backends.mcore.groups import megatron_on_cpu

        around, batch = megatron_on_cpu(), engine.prepare(batch)
    engine.zero_gradients()
    low = model.dtype == "bfloat16" and model.backend == "hf"
    with around, Alive(module.parameters()) as alive:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            losses = module(batch, params)
        alive.after_forward = alive.now
        losses.sum().backward()
    gradients = {
        name: getattr(parameter, "main_grad", parameter.grad)
        for name, parameter in module.named_parameters()
    }
    return losses.detach(), gradients, alive


@pytest.mark.cases(slow="hf-float32")
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), ENGINES)
def test_the_same_numbers_in_fewer_bytes(backend, dtype, encoder, encoded):
    """Losses and gradients of rows with images bit for bit; of rows of text the bytes that are
    saved, by tokens: differences of two rows, so that what is not in layers drops out."""
    sizes, expected, saves = read_sizes(TINY_MODEL), None, []
    assert sizes is not None
    for value in VALUES:
        model = section(value, backend, dtype)
        engine = engine_of(model, ParallelismSection(), encoder, single_rank(), EVERYTHING)
        rows = []
        for count in (1, 3):
            # No neighbours of one length: those share a call, whose output is not copied.
            lengths = (56, 72) * count
            samples = [text_sample(str(n), list(range(x)), axes=3) for n, x in enumerate(lengths)]
            rows.append(losses_of(engine, model, encoder, samples)[2].after_forward)
        mode = mode_of(max_row_slots=256, max_row_patches=0)
        figures = memory_figures(
            model, ParallelismSection(), sizes, mode, global_batch_size=16, world_size=1
        )
        saves.append((rows[1] - rows[0], figures.activations - figures.again))
        losses, gradients, alive = losses_of(engine, model, encoder, encoded[:3])
        expected = expected or (losses, gradients, alive)
        assert torch.equal(losses, expected[0]), value
        assert gradients.keys() == expected[1].keys()
        assert all(torch.equal(gradients[n], expected[1][n]) for n in gradients), value
        assert any(g.any() for n, g in gradients.items() if "visual" in n or "vision" in n)
        assert value == "none" or alive.after_forward < expected[2].after_forward
    for value, (kept, said) in zip(VALUES[1:], saves[1:], strict=True):
        print(f"{backend} {dtype} {value}: {saves[0][0] - kept:,} of {saves[0][1] - said:,} bytes")
        assert saves[0][1] > said
        assert saves[0][0] - kept == pytest.approx(saves[0][1] - said, rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_bits(family, tmp_path):
    """Two micro-batches on the hf engine."""
    folder = tiny_family_folder(family, tmp_path)
    encoder, everything = Encoder(folder), samples(folder)
    rows = [
        pack_batch_sequences(part, pad_token_id=encoder.pad_token_id)
        for part in (everything[:4], everything[4:])
    ]
    expected: Any = None
    for value in VALUES:
        engine = make_engine(folder, encoder, activation_checkpointing=value)
        again = [
            layer
            for layer in engine.vlm.modules()
            if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
        ]
        assert bool(again) is (value != "none")
        engine.zero_gradients()
        reports = engine.forward_backward(SFT.step_with(), iter(rows), num_microbatches=2)
        losses = [float(report["loss_sum"]) for report in reports]
        gradients = {name: p.grad for name, p in engine.parameters() if p.grad is not None}
        expected = expected or (losses, gradients)
        assert losses == expected[0] and gradients.keys() == expected[1].keys()
        assert all(torch.equal(gradients[name], expected[1][name]) for name in gradients), value


@pytest.mark.slow
def test_a_layer_that_computes_something_else_again_is_found(encoder, encoded, monkeypatch):
    """Controls: random numbers that are not drawn alike, and an operator that is not kept."""
    adapters = policy(dropout=0.5, vision="frozen", projector="frozen", language="lora")

    def gradients(value: Any) -> dict[str, Any]:
        engine = make_engine(TINY_MODEL, encoder, policy=adapters, activation_checkpointing=value)
        torch.manual_seed(0)
        found = losses_of(engine, section(value), encoder, encoded)[1]
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    expected, found = gradients("none"), gradients("full")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    monkeypatch.setattr("vlmpack.backends.hf.engine.draws_random_numbers", lambda *_, **__: False)
    found = gradients("full")
    assert not all(torch.equal(found[name], expected[name]) for name in expected)
    plain = one_pass(section("selective"), encoder, encoded)[2].after_forward
    monkeypatch.setattr(recompute, "_policy", lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    assert one_pass(section("selective"), encoder, encoded)[2].after_forward < plain / 2


def test_a_class_that_transformers_does_not_recompute_is_refused(session_engine, monkeypatch):
    model = session_engine.vlm.model
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(CapabilityError, match=r"no layer of Qwen.* again; set it to none"):
        recompute_layers(model, "full", draws=False)
    recompute_layers(model, "none", draws=False)


def test_random_numbers_are_kept_only_where_some_are_drawn(session_engine):
    model = session_engine.vlm.model
    assert not draws_random_numbers(model, adapter_dropout=0.0)
    assert draws_random_numbers(model, adapter_dropout=0.1)
    text = model.config.text_config
    text.attention_dropout = 0.1
    try:
        assert draws_random_numbers(model, adapter_dropout=0.0)
    finally:
        text.attention_dropout = 0.0
    seen = []
    tower = torch.nn.Sequential(torch.nn.Dropout(0.2))
    tower.config = model.config
    assert draws_random_numbers(tower, adapter_dropout=0.0)
    for draws in (False, True):
        recompute_layers(model, "full", draws=draws)
        run = model.model.language_model.layers[0]._gradient_checkpointing_func
        seen.append(run.keywords["preserve_rng_state"])
    for layer in model.modules():
        if hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = False
    assert seen == [False, True]


@pytest.mark.parametrize(("value", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_attention_of_wide_heads_is_kept_with_the_products(value: Any, times: int) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
            q = x.sin()
            return wide_attention(q, q[:, :1], q[:, 1:], cu_seqlens)

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    seen: Counter[str] = Counter()
    layer, x = Layer().train(), torch.randn(7, 2, 24, requires_grad=True)
    recompute_modules({0: layer}, value)
    with Counted():
        layer(x, torch.tensor([0, 3, 7], dtype=torch.int32)).sum().backward()
    assert seen["vlmpack::wide_attention"] == times
    assert seen["aten::sin"] == (1 if value == "none" else 2)
    assert seen["vlmpack::wide_attention_backward"] == 1
