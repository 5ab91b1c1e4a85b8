"""The decoder of rows of one shape, recorded once: what stays the same, what is refilled."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.captured import (
    PLANTED,
    ROW,
    EagerRecording,
    StreamRecording,
    bakes_a_window,
    family,
    first_difference,
    host_reads,
    packed,
    rows_from,
    rows_of,
    text_row,
)
from support.families import tiny_family_folder
from support.runs import find_differences, run_batch
from support.shards import TINY_MODEL

from vlmpack.attention import AttentionChoice
from vlmpack.attention.varlen import segment_attention
from vlmpack.backends.decoder_graph import TapeRecording
from vlmpack.backends.hf.attention import register_attention
from vlmpack.errors import CapabilityError

CAPTURED = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "nemotron_h", "internvl", "mistral3"),
)
"""MRoPE, DeepStack, a hybrid with images, experts, Mamba-2, and towers of other kinds."""


def _with_attention(function):
    """The committed model with another attention over rows."""
    vlm, encoder = packed(TINY_MODEL, fixed_shape=True)
    choice = AttentionChoice("planted", function, "")
    vlm.language.set_attn_implementation(register_attention(choice))
    return vlm, encoder


def _assert_identical(found, wanted):
    assert found.losses.keys() == wanted.losses.keys() and found.losses
    assert all(torch.equal(found.losses[key], wanted.losses[key]) for key in wanted.losses)
    for name, theirs in wanted.gradients.items():
        assert torch.equal(found.gradients[name], theirs), name


# What follows from a row's segments cannot be captured


@pytest.mark.parametrize(
    ("planted", "what"), PLANTED.items(), ids=lambda each: getattr(each, "__name__", each)
)
def test_what_follows_from_segments_is_found(planted, what):
    """The controls of the families' test below."""
    vlm, encoder = _with_attention(planted)
    graph = vlm.capture_decoder(StreamRecording)
    for lengths in ((5, 9), (12,)):
        ROW[:] = lengths
        (row,) = rows_from([text_row(*lengths)], encoder, 16).fixed
        vlm(row, row.packed_seq_params()).sum().backward()
    streams = graph.recording.streams
    found = [*host_reads(streams), first_difference(streams) or ""]
    assert any(what in each for each in found), found


def test_a_loop_over_segments_cannot_be_captured():
    vlm, encoder = _with_attention(segment_attention)
    vlm.capture_decoder(EagerRecording)
    (row,) = rows_from([text_row(5, 9)], encoder, 16).fixed
    with pytest.raises(CapabilityError, match="read on the host inside a captured graph"):
        vlm(row, row.packed_seq_params())


class _Watched(EagerRecording):
    """Notes which leaves its backward pass would end at."""

    def __init__(self, stretch, wrt):
        super().__init__(stretch, wrt)
        nodes, seen, self.leaves = [stretch().grad_fn], set(), []
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            self.leaves += [node.variable] if hasattr(node, "variable") else []


def test_nodes_that_a_replicas_wrapper_keeps_are_not_in_a_recording():
    """They are bound to the stream that they were made on."""
    vlm, encoder = packed(TINY_MODEL, fixed_shape=True)
    weights = dict(vlm.language.named_parameters())
    kept = [weight.expand_as(weight).grad_fn.next_functions[0][0] for weight in weights.values()]
    assert {id(node.variable) for node in kept} == {*map(id, weights.values())}
    graph = vlm.capture_decoder(_Watched)
    (row,) = rows_from([text_row(5, 9)], encoder, 16).fixed
    vlm(row, row.packed_seq_params()).sum().backward()
    found = graph.recording.leaves
    assert len(found) > 40 and not {*map(id, found)} & {*map(id, weights.values())}
    lie = {weight.data_ptr() for weight in weights.values()}
    assert sum(leaf.data_ptr() in lie for leaf in found) == len(found) - 1  # and the embeddings
    assert {n: id(w) for n, w in vlm.language.named_parameters()} == {
        name: id(weight) for name, weight in weights.items()
    }
    assert all(weight.grad is not None for weight in weights.values())


# A replay reads the buffers


@pytest.mark.soak
@pytest.mark.parametrize("name", CAPTURED)
def test_rows_of_a_family_run_the_same_operators_and_replay(name, tmp_path):
    folders = [tmp_path / letter for letter in "abc"]
    recorded, encoder = family(name, folders[0], fixed_shape=True)
    eager, _ = family(name, folders[1], fixed_shape=True)
    rows = rows_of(encoder)
    assert len({len(row.lengths) for row in rows.fixed}) > 1
    assert encoder.takes_images == any(row.media is not None for row in rows.fixed)
    graph = recorded.capture_decoder(TapeRecording)
    same = eager.capture_decoder(StreamRecording)
    found = [run_batch(recorded, row) for row in rows.fixed]
    for run, row in zip(found, rows.fixed, strict=True):
        _assert_identical(run, run_batch(eager, row))
    assert graph.captures == same.captures == 1
    assert graph.replays == same.replays == len(rows.fixed) > 2
    streams = same.recording.streams
    assert min(map(len, streams)) > 500, "forward and backward"
    assert first_difference(streams) is None
    assert host_reads(streams) == []
    free, _ = family(name, folders[2], fixed_shape=False)
    for run, row in zip(found, rows.free, strict=True):
        assert find_differences(run, run_batch(free, row)) == []


@pytest.mark.soak
def test_fifty_other_rows_are_replayed_bit_for_bit(tmp_path):
    """In double: of made-up text the gradients of queries are all cancellation."""
    folder = tiny_family_folder("qwen3", tmp_path)
    recorded, encoder = packed(folder, fixed_shape=True)
    eager, free = (packed(folder, fixed_shape=fixed)[0] for fixed in (True, False))
    for vlm in (recorded, eager, free):
        vlm.double()
    draw = torch.Generator().manual_seed(0)
    rows = []
    for number in range(51):
        cuts = torch.randperm(30, generator=draw)[: number % 8].sort().values + 1
        ends = [0, *cuts.tolist(), 31]
        rows.append(text_row(*(b - a + 1 for a, b in pairwise(ends)), axes=1))
    assert {len(row) for row in rows} == set(range(1, 9))
    made = rows_from(rows, encoder, 48)
    graph = recorded.capture_decoder(TapeRecording)
    eager.capture_decoder(EagerRecording)
    for fixed, alone in zip(made.fixed, made.free, strict=True):
        found = run_batch(recorded, fixed)
        _assert_identical(found, run_batch(eager, fixed))
        assert find_differences(found, run_batch(free, alone)) == []
    assert graph.captures == 1 and graph.replays == 51


@pytest.mark.slow
def test_a_baked_number_makes_replays_wrong():
    """The control."""
    vlm, encoder = _with_attention(bakes_a_window)
    graph = vlm.capture_decoder(TapeRecording)
    made = rows_from([text_row(4, 4), text_row(14)], encoder, 16)
    ROW[:] = [4]
    with torch.no_grad():
        wanted = packed(TINY_MODEL, fixed_shape=True)[0](
            made.fixed[1], made.fixed[1].packed_seq_params()
        )
    losses = [vlm(row, row.packed_seq_params()).detach() for row in made.fixed]
    assert graph.captures == 1
    assert not torch.allclose(losses[1], wanted, rtol=1e-4)


# What a step does around it


@pytest.fixture(scope="module")
def small():
    """A recorded decoder, one that runs eagerly, and rows of up to four samples."""
    recorded, encoder = packed(TINY_MODEL, fixed_shape=True)
    plain, _ = packed(TINY_MODEL, fixed_shape=True)
    rows = rows_from(
        [text_row(5, 9), text_row(12), text_row(3, 3, 3, 3)], encoder, 16, max_sequences=4
    )
    recorded.capture_decoder(TapeRecording)
    recorded(rows.fixed[0], rows.fixed[0].packed_seq_params()).sum().backward()
    return recorded, plain, rows.fixed


def _accumulated(vlm, rows):
    vlm.zero_grad(set_to_none=True)
    for row in rows:
        vlm(row, row.packed_seq_params()).sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in vlm.named_parameters()}


@pytest.mark.slow
def test_gradients_of_micro_batches_add_up(small):
    """What a first micro-batch left in `.grad` is not what the second one writes over."""
    recorded, plain, rows = small
    for _ in range(2):  # `.grad` is None again
        found, wanted = _accumulated(recorded, rows), _accumulated(plain, rows)
        assert {n for n, g in found.items() if g is None} == {
            n for n, g in wanted.items() if g is None
        }
        for name, theirs in wanted.items():
            if theirs is not None:
                torch.testing.assert_close(found[name], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_optimizer_step_needs_no_new_recording(small):
    recorded, plain, rows = small
    for vlm in (recorded, plain):
        _accumulated(vlm, rows[:1])
        torch.optim.SGD(vlm.parameters(), lr=0.1).step()
    found, wanted = (run_batch(vlm, rows[1]) for vlm in (recorded, plain))
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-6)
    assert recorded.graph.captures == 1


def test_rows_of_other_kinds_run_eager(small):
    recorded, _, rows = small
    before = recorded.graph.replays
    row = replace(rows[0], fixed_shape=False)
    assert recorded(row, row.packed_seq_params()).requires_grad
    with torch.no_grad():
        recorded(rows[0], rows[0].packed_seq_params())
    assert recorded.graph.replays == before


def test_a_row_of_another_shape_is_named(small):
    recorded, _, _ = small
    encoder = packed(TINY_MODEL, fixed_shape=True)[1]
    (wide,) = rows_from([text_row(5, 9)], encoder, 24, max_sequences=4).fixed
    with pytest.raises(CapabilityError, match=r"captured decoder has embeddings of .*16.*24"):
        recorded(wide, wide.packed_seq_params())


def test_a_row_between_forward_and_backward_is_refused(small):
    recorded, _, rows = small
    losses = recorded(rows[0], rows[0].packed_seq_params())
    recorded(rows[1], rows[1].packed_seq_params())
    with pytest.raises(RuntimeError, match="another row"):
        losses.sum().backward()


@pytest.mark.slow
def test_recomputed_layers_are_recorded_too(small):
    _, plain, rows = small
    vlm, _ = packed(TINY_MODEL, fixed_shape=True, checkpointing=True)
    vlm.load_state_dict(plain.state_dict())
    graph = vlm.capture_decoder(TapeRecording)
    found, wanted = run_batch(vlm, rows[2]), run_batch(plain, rows[2])
    assert graph.captures == 1 and find_differences(found, wanted) == []


@pytest.mark.slow
def test_weights_are_cast_in_every_replay(small):
    """Under autocast: a cast weight that is kept would be that of the first step for ever."""
    _, plain, rows = small
    vlm, _ = packed(TINY_MODEL, fixed_shape=True)
    vlm.load_state_dict(plain.state_dict())
    vlm.capture_decoder(TapeRecording)
    with torch.no_grad():
        for step in range(2):
            for model in (vlm, plain):
                model.language.layers[0].mlp.up_proj.weight.mul_(1 + step)
            with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                found, wanted = (m(rows[0], rows[0].packed_seq_params()) for m in (vlm, plain))
            assert torch.equal(found, wanted)
