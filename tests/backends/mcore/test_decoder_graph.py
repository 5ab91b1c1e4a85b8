"""Megatron's layers of rows of one shape, recorded once and replayed, as the hf engine's are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from support.captured import (
    PLANTED,
    ROW,
    EagerRecording,
    StreamRecording,
    bakes_a_window,
    first_difference,
    host_reads,
    rows_from,
    rows_of,
    text_row,
)
from support.engines import EVERYTHING, policy, single_rank
from support.families import tiny_family_folder
from support.runs import relative_l2
from support.shards import TINY_MODEL

from vlmpack.attention import AttentionChoice
from vlmpack.attention.varlen import segment_attention
from vlmpack.backends.decoder_graph import TapeRecording
from vlmpack.backends.mcore.engine import MegatronEngine
from vlmpack.build.engine import resolved_compute
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.packing import FixedShape, PackCollator
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.objective import SFT

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.*is deprecated:FutureWarning",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)


def _engine(
    folder=TINY_MODEL,
    *,
    captures=True,
    recorder=TapeRecording,
    function=None,
    trained=EVERYTHING,
    recomputed="none",
    fused="none",
):
    model = ModelSection(
        path=str(folder),
        backend="mcore",
        dtype="float32",
        activation_checkpointing=recomputed,
        fused_layers=fused,
    )
    split, ranks, encoder = ParallelismSection(), single_rank(), Encoder(folder)
    compute = resolved_compute(model, split, encoder, ranks.device, captures=captures)
    if function is not None:
        compute = replace(compute, attention=AttentionChoice("planted", function, ""))
    with patch("vlmpack.backends.mcore.engine.recorder", lambda _: recorder):
        return MegatronEngine(model, split, encoder, ranks, trained, compute)


def _step(engine, rows):
    """Losses by row, and gradients of their sum by parameter."""
    engine.zero_gradients()
    reports = engine.forward_backward(SFT.step_with(), iter(rows), num_microbatches=len(rows))
    losses = [float(report["loss_sum"]) for report in reports]
    return losses, {
        name: parameter.main_grad.clone()
        for name, parameter in engine.model.named_parameters()
        if parameter.requires_grad
    }


def _assert_close(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert found[1].keys() == wanted[1].keys() and found[1]
    for name, theirs in wanted[1].items():
        assert relative_l2(found[1][name], theirs) <= 1e-5, name


def _assert_identical(found, wanted):
    assert found[0] == wanted[0] and found[1].keys() == wanted[1].keys()
    assert [
        name for name, theirs in wanted[1].items() if not torch.equal(found[1][name], theirs)
    ] == []


@pytest.mark.cases(slow="8-trained1-selective-none")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_sequences", "trained", "recomputed", "fused"),
    [
        (1, EVERYTHING, "full", "compile"),
        (8, EVERYTHING, "selective", "none"),
        (32, policy("frozen", "full", "full"), 2, "none"),
    ],
)
def test_losses_and_gradients_are_those_of_free_rows(
    max_sequences, trained, recomputed, fused, encoder, encoded
):
    bins = [encoded, encoded[:1], [], encoded[2:4], encoded[4:5]]
    shape = FixedShape(row_tokens=300, max_sequences=max_sequences, overflows=True)
    free = PackCollator(pad_token_id=561, num_position_axes=3)
    fixed = PackCollator(pad_token_id=561, num_position_axes=3, fixed=shape)
    captured = _engine(trained=trained, recomputed=recomputed, fused=fused)
    plain = _engine(trained=trained, captures=False)
    rows = [fixed(samples) for samples in bins]
    overflowing = [len(samples) > max_sequences for samples in bins]
    assert [row.overflows for row in rows] == overflowing
    for _ in range(2):
        _assert_close(_step(captured, rows), _step(plain, [free(samples) for samples in bins]))
        for engine in (captured, plain):  # the next pass is of other weights
            for parameter in engine.model.parameters():
                with torch.no_grad():
                    parameter.mul_(1.01)
    graph = captured.model.graph
    assert graph.captures == 1
    assert graph.replays == 2 * (len(bins) - sum(overflowing))
    assert "captured" in captured.description and "captured" not in plain.description
    # validation and its rows run without
    captured.forward_backward(
        SFT.step_with(), iter(rows[:1]), num_microbatches=1, forward_only=True
    )
    assert graph.captures == 1 and graph.replays == 2 * (len(bins) - sum(overflowing))


@pytest.mark.cases(slow="qwen2_5_vl")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_rows_of_a_family_run_the_same_operators_and_replay(name, tmp_path):
    """MRoPE, DeepStack, and a language model alone."""
    folder = tiny_family_folder(name, tmp_path)
    engines = {each: _engine(folder, recorder=each) for each in (TapeRecording, StreamRecording)}
    recorded, eager = engines.values()
    plain = _engine(folder, captures=False)
    encoder = Encoder(folder)
    rows = rows_of(encoder)
    assert len({len(row.lengths) for row in rows.fixed}) > 1
    assert encoder.takes_images == any(row.media is not None for row in rows.fixed)
    for fixed, free in zip(rows.fixed, rows.free, strict=True):
        found = _step(recorded, [fixed])
        _assert_identical(found, _step(eager, [fixed]))
        _assert_close(found, _step(plain, [free]))
    graph, same = recorded.model.graph, eager.model.graph
    assert graph.captures == same.captures == 1
    assert graph.replays == same.replays == len(rows.fixed) > 2
    streams = same.recording.streams
    assert min(map(len, streams)) > 300, "forward and backward"
    assert first_difference(streams) is None
    assert host_reads(streams) == []


@pytest.mark.soak
def test_fifty_other_rows_are_replayed_bit_for_bit(tmp_path):
    folder = tiny_family_folder("qwen3", tmp_path)
    recorded, eager = (_engine(folder, recorder=each) for each in (TapeRecording, EagerRecording))
    plain = _engine(folder, captures=False)
    draw = torch.Generator().manual_seed(0)
    rows = []
    for number in range(51):
        cuts = torch.randperm(30, generator=draw)[: number % 8].sort().values + 1
        ends = [0, *cuts.tolist(), 31]
        rows.append(text_row(*(b - a + 1 for a, b in pairwise(ends)), axes=1))
    assert {len(row) for row in rows} == set(range(1, 9))
    made = rows_from(rows, Encoder(folder), 48)
    for fixed, alone in zip(made.fixed, made.free, strict=True):
        found = _step(recorded, [fixed])
        _assert_identical(found, _step(eager, [fixed]))
        assert found[0] == pytest.approx(_step(plain, [alone])[0], rel=1e-6)
    assert recorded.model.graph.captures == 1 and recorded.model.graph.replays == 51


# What follows from a row's segments cannot be captured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "what"), PLANTED.items(), ids=lambda each: getattr(each, "__name__", each)
)
def test_what_follows_from_segments_is_found(planted, what, encoder):
    engine = _engine(recorder=StreamRecording, function=planted)
    for lengths in ((5, 9), (12,)):
        ROW[:] = lengths
        _step(engine, rows_from([text_row(*lengths)], encoder, 16).fixed)
    streams = engine.model.graph.recording.streams
    found = [*host_reads(streams), first_difference(streams) or ""]
    assert any(what in each for each in found), found


@pytest.mark.slow
def test_a_baked_number_makes_replays_wrong(encoder):
    made = rows_from([text_row(4, 4), text_row(14)], encoder, 16)
    wanted, _ = _step(_engine(captures=False), made.free)
    ROW[:] = [4]
    engine = _engine(function=bakes_a_window)
    losses, _ = _step(engine, made.fixed)
    assert engine.model.graph.captures == 1
    assert losses[0] == pytest.approx(wanted[0], rel=1e-6)
    assert losses[1] != pytest.approx(wanted[1], rel=1e-4)


@pytest.mark.slow
def test_a_loop_over_segments_cannot_be_captured(encoder):
    engine = _engine(function=segment_attention)
    with pytest.raises(CapabilityError, match="read on the host inside a captured graph"):
        _step(engine, rows_from([text_row(5, 9)], encoder, 16).fixed)


# Gradients go where Megatron adds them up


class _InPlace(TapeRecording):
    """Gives what it gave into the same places again, as CUDA graphs do."""

    def __init__(self, stretch, wrt):
        super().__init__(stretch, wrt)
        self.given = {}

    def forward(self):
        return self._again("output", super().forward())

    def backward(self, gradient):
        found = super().backward(gradient)
        return tuple(self._again(number, each) for number, each in enumerate(found))

    def _again(self, key, tensor):
        return self.given.setdefault(key, torch.empty_like(tensor)).copy_(tensor)


@pytest.mark.slow
def test_gradients_of_micro_batches_add_up_in_megatrons_buffers(encoder):
    rows = rows_from([text_row(5, 9), text_row(12), text_row(3, 3, 3, 3)], encoder, 16).fixed
    engines = [_engine(recorder=each) for each in (_InPlace, EagerRecording)]
    for _ in range(2):
        found, wanted = (_step(engine, rows) for engine in engines)
        _assert_identical(found, wanted)
    parameters = list(engines[0].model.parameters())
    assert all(parameter.grad is None for parameter in parameters)
    graph = engines[0].model.graph
    places = {each.data_ptr() for each in graph.recording.given.values()}
    assert len(places) == 1 + len(graph._weights) + 1, "hidden states, weights, embeddings"
    assert not places & {parameter.main_grad.data_ptr() for parameter in parameters}
