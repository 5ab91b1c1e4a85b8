"""Attention over slices of a row against attention over the row, and the gathers it rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import collectives_worker as worker
from support.forked import check_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.attention import segment_attention
from vlmpack.backends.mcore import attention
from vlmpack.errors import CapabilityError
from vlmpack.packing import PackedSeqParams
from vlmpack.packing.prefix_tree import PrefixTree


def whole_row(lengths, query, key, value):
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    params = PackedSeqParams(
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        segment_lengths=tuple(lengths),
    )
    return segment_attention(query, key, value, params)


@pytest.fixture(scope="module")
def expected():
    """Output and gradients of the whole row."""
    query, key, value, factor = worker.row()
    inputs = [part.requires_grad_() for part in (query, key, value)]
    output = whole_row(worker.SEGMENTS, *inputs)
    return output.detach(), torch.autograd.grad((output * factor).sum(), inputs)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_slices_of_all_ranks_compute_the_row(size, scale, monkeypatch):
    """Ranks one after the other; the gather is the concatenation of their slices."""
    lengths = tuple(2 * size * n for n in (2, 2, 1, 3, 3, 3, 1))
    monkeypatch.setattr(worker, "SEGMENTS", lengths)
    query, key, value, factor = worker.row()
    inputs = [part.requires_grad_() for part in (query, key, value)]
    slices = [worker.context_slice(rank, size) for rank in range(size)]
    both = torch.cat([torch.stack((key, value), dim=1)[own.row_index] for own in slices])
    monkeypatch.setattr(attention, "gather_slices", lambda local, order, group: both[order])
    outputs = torch.empty_like(query)
    for own in slices:
        local = [part[own.row_index] for part in inputs]
        output = attention.context_parallel_attention(*local, lengths, own, group=None, scale=scale)
        outputs = outputs.index_copy(0, own.row_index, output)
    found = torch.autograd.grad((outputs * factor).sum(), inputs)
    scaled = query * (scale * worker.WIDTH**0.5) if scale else query
    row = whole_row(lengths, scaled, key, value)
    torch.testing.assert_close(outputs, row)
    for mine, other in zip(found, torch.autograd.grad((row * factor).sum(), inputs), strict=True):
        torch.testing.assert_close(mine, other)


def test_segments_are_split_off_the_row_not_sliced(monkeypatch):
    """The backward of every slice would fill the gathered row with zeros."""
    lengths = tuple(4 * n for n in range(1, 33))
    monkeypatch.setattr(worker, "SEGMENTS", lengths)
    query, key, value, _ = worker.row()
    own = worker.context_slice(1, 2)
    both = torch.stack((key, value), dim=1).requires_grad_()
    monkeypatch.setattr(attention, "gather_slices", lambda local, order, group: both)
    local = [part[own.row_index].requires_grad_() for part in (query, key, value)]
    filled = []
    leaves = {"row": both.shape, "queries": local[0].shape}
    original = torch.ops.aten.slice_backward.default

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is original:
                filled.append(tuple(args[1]))
            return func(*args, **(kwargs or {}))

    output = attention.context_parallel_attention(*local, lengths, own, group=None)
    with Watch():
        output.sum().backward()
    assert both.grad.count_nonzero() > 0 and local[0].grad is not None
    assert filled, "a chunk's keys are a slice of its own segment"
    assert not [shape for shape in filled if shape in [tuple(s) for s in leaves.values()]]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    check_ranks([worker.__file__, folder], 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_two_processes_compute_the_row_forward_and_backward(results, expected):
    output, gradients = expected
    assert len(set(worker.SEGMENTS)) > 1
    assert worker.SEGMENTS[0] == worker.SEGMENTS[1], "a run of equal segments"
    for rank, found in enumerate(results):
        mine = worker.context_slice(rank, 2).row_index
        torch.testing.assert_close(found["output"], output[mine])
        for name, whole in zip(("query", "key", "value"), gradients, strict=True):
            torch.testing.assert_close(found[name], whole[mine])


@pytest.mark.slow
def test_the_gather_restores_the_order_and_its_backward_sums(results):
    tokens = sum(worker.SEGMENTS)
    for found in results:
        assert found["whole"].tolist() == list(range(tokens))
        assert found["of gather"].tolist() == [3.0] * (tokens // 2), "1 from rank 0, 2 from rank 1"


@pytest.mark.slow
def test_features_come_in_image_order_and_gradients_go_home(results):
    """Context-parallel ranks each saw a part, so theirs are summed; tensor-parallel ones all."""
    first = torch.arange(6.0).view(3, 2)
    in_order = worker.features(0)[list(worker.ORDER)]
    for rank, found in enumerate(results):
        for kind, weight in (("tp", first + 100 * rank), ("cp", 2 * first + 100)):
            assert torch.equal(found[f"features {kind}"], in_order)
            gradient = found[f"features gradient {kind}"]
            assert gradient.shape == (worker.COUNTS[rank], 2)
            if rank == 0:
                home = torch.empty_like(weight)
                home[list(worker.ORDER)] = weight
                assert torch.equal(gradient, home)


@pytest.mark.slow
def test_a_sum_of_parts_is_everywhere_and_each_rank_differentiates_its_own(results):
    """As if the other parts were constants: an all-reduce in backward would count them twice."""
    for found in results:
        assert found["sum"].tolist() == [6.0, 9.0]
        assert found["of sum"].tolist() == [12.0, 18.0]


def test_a_row_that_holds_a_prefix_once_is_refused():
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    params = PackedSeqParams(
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=3,
        max_seqlen_kv=3,
        segment_lengths=(2, 3),
        prefix_tree=PrefixTree(parents=(-1, 0), lengths=(2, 3)),
    )
    angles = {"cos": torch.ones(5, 4), "sin": torch.zeros(5, 4), "context": None, "deep": ()}
    with pytest.raises(CapabilityError, match="knows no such rows"):
        attention.megatron_params(params, **angles)
    plain = attention.megatron_params(replace(params, prefix_tree=None), **angles)
    assert plain.row.segment_lengths == (2, 3)
