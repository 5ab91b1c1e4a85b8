"""An engine whose decoder is captured has the losses and gradients of one that is not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.engines import EVERYTHING, policy, single_rank
from support.runs import relative_l2
from support.shards import TINY_MODEL

from vlmpack.backends.fused import compiled_gated
from vlmpack.backends.hf.engine import HFEngine
from vlmpack.build.engine import resolved_compute
from vlmpack.errors import CapabilityError
from vlmpack.forecast.activations import Forms
from vlmpack.forecast.figures import LargestMicroBatch
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.packing import FixedShape, PackCollator
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.objective import SFT


def _engine(encoder, trained, *, captures, recomputed="none", fused="none"):
    model = ModelSection(
        path=str(TINY_MODEL),
        dtype="float32",
        activation_checkpointing=recomputed,
        fused_layers=fused,
    )
    split, ranks = ParallelismSection(), single_rank()
    compute = resolved_compute(model, split, encoder, ranks.device, captures=captures)
    return HFEngine(model, split, encoder, ranks, trained, compute)


def _gradients(engine, rows):
    engine.zero_gradients()
    reports = engine.forward_backward(SFT.step_with(), iter(rows), num_microbatches=len(rows))
    losses = [float(report["loss_sum"]) for report in reports]
    return losses, {n: p.grad.clone() for n, p in engine.parameters() if p.grad is not None}


def _gradient_bytes(trained, encoder, captured=False):
    """By plan's estimate."""
    model, sizes = ModelSection(path=str(TINY_MODEL), dtype="float32"), read_sizes(TINY_MODEL)
    figures = memory_figures(
        *(model, ParallelismSection(), sizes, LargestMicroBatch(1, 300, 0)),
        global_batch_size=1,
        world_size=1,
        trained=trained_sizes(trained, encoder),
        forms=Forms(captured=captured),
    )
    return figures.gradients


@pytest.mark.slow
def test_random_numbers_are_no_part_of_layers_that_a_graph_computes_again(encoder, monkeypatch):
    monkeypatch.setattr("vlmpack.backends.hf.engine.draws_random_numbers", lambda *_, **__: True)
    with pytest.raises(CapabilityError, match=r"dropout or jitter.*activation_checkpointing: none"):
        _engine(encoder, EVERYTHING, captures=True, recomputed="full")
    _engine(encoder, EVERYTHING, captures=True)
    _engine(encoder, EVERYTHING, captures=False, recomputed="full")


@pytest.mark.cases(slow="1-trained0-selective-none")
@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("max_sequences", "trained", "recomputed", "fused"),
    [
        (1, EVERYTHING, "selective", "none"),
        (8, EVERYTHING, "full", "compile"),
        (32, policy("frozen", "frozen", "lora"), 2, "none"),
    ],
)
def test_losses_and_gradients_are_those_of_free_rows(
    max_sequences, trained, recomputed, fused, encoder, encoded, monkeypatch
):
    compiled = partial(compiled_gated, backend="eager")
    monkeypatch.setattr("vlmpack.backends.fused.compiled_gated", compiled)
    bins = [encoded, encoded[:1], [], encoded[2:4], encoded[4:5]]
    shape = FixedShape(row_tokens=300, max_sequences=max_sequences, overflows=True)
    free = PackCollator(pad_token_id=561, num_position_axes=3)
    fixed = PackCollator(pad_token_id=561, num_position_axes=3, fixed=shape)
    captured = _engine(encoder, trained, captures=True, recomputed=recomputed, fused=fused)
    plain = _engine(encoder, trained, captures=False)
    rows = [fixed(samples) for samples in bins]
    overflowing = [len(samples) > max_sequences for samples in bins]
    assert [row.overflows for row in rows] == overflowing
    for _ in range(2):
        losses, gradients = _gradients(captured, rows)
        wanted, reference = _gradients(plain, [free(samples) for samples in bins])
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert gradients.keys() == reference.keys() and gradients
        for name, theirs in reference.items():
            assert relative_l2(gradients[name], theirs) <= 1e-5, name
        for engine in (captured, plain):  # the next pass is of other weights
            for _, parameter in engine.parameters():
                with torch.no_grad():
                    parameter.mul_(1.01)
    assert captured.graph.captures == 1
    assert captured.graph.replays == 2 * (len(bins) - sum(overflowing))
    held = 4 * sum(weight.numel() for weight in captured.graph._weights)
    assert _gradient_bytes(trained, encoder, True) - _gradient_bytes(trained, encoder) == held > 0
    assert "captured" in captured.description and "captured" not in plain.description
    # validation and its rows run without
    with torch.no_grad():
        captured.forward_backward(
            SFT.step_with(), iter(rows[:1]), num_microbatches=1, forward_only=True
        )
    assert captured.graph.captures == 1
