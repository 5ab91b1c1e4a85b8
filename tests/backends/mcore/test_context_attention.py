"""Attention over slices of a row against attention over the row, and the gathers it rests on.

Run in ranks: context-parallel attention, the two gathers and the sum over gloo.

    torchrun --nproc-per-node 2 test_context_attention.py FOLDER

Writes FOLDER/<rank>.pt: forward results and gradients of this rank.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.forked import check_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.attention import segment_attention
from vlmpack.backends.collectives import gather_features, gather_slices, sum_parts
from vlmpack.backends.mcore import attention
from vlmpack.backends.mcore.attention import context_parallel_attention
from vlmpack.backends.mcore.mixers import PackedGatedDeltaNet, PackedMamba2
from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.errors import CapabilityError
from vlmpack.packing import ContextSlice, PackedSeqParams
from vlmpack.packing.context import zigzag_index
from vlmpack.packing.prefix_tree import PrefixTree

SEGMENTS = (8, 8, 4, 12, 12, 12, 4, 8)
HEADS, GROUPS, WIDTH = 4, 2, 8
COUNTS = (3, 0)
"""Image features by rank: the second rank has none."""
ORDER = (2, 0, 1)


def drawn_row() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values of a row, and a factor on its output."""
    draw = torch.Generator().manual_seed(0)
    tokens = sum(SEGMENTS)
    shapes = ((tokens, HEADS, WIDTH), (tokens, GROUPS, WIDTH), (tokens, GROUPS, WIDTH))
    made = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    factor = torch.randn(*shapes[0], generator=draw, dtype=torch.float64)
    return made[0], made[1], made[2], factor


def context_slice(rank: int, size: int) -> ContextSlice:
    """What a rank holds of the row; no labels."""
    rows = [zigzag_index(SEGMENTS, rank=r, size=size) for r in range(size)]
    nothing = torch.empty(0, dtype=torch.int64)
    return ContextSlice(
        rank=rank,
        size=size,
        row_index=rows[rank],
        natural_order=torch.cat(rows).argsort(),
        label_positions=nothing,
        label_places=nothing,
        targets=nothing,
        media_positions=nothing,
        media_sources=nothing,
    )


def features(rank: int) -> Tensor:
    """This rank's image features."""
    return 10.0 * rank + torch.arange(2.0 * COUNTS[rank]).view(-1, 2)


def main(folder: Path) -> None:
    """Everything, on each rank."""
    ranks = start_process_group(context=2)
    own = context_slice(ranks.rank, 2)
    local = [part[own.row_index].requires_grad_() for part in drawn_row()[:3]]
    output = context_parallel_attention(*local, SEGMENTS, own, group=dist.group.WORLD)
    gradients = torch.autograd.grad((output * drawn_row()[3][own.row_index]).sum(), local)

    numbers = own.row_index.double().requires_grad_()
    whole = gather_slices(numbers, own.natural_order, dist.group.WORLD)
    (of_gather,) = torch.autograd.grad((whole * (ranks.rank + 1)).sum(), numbers)

    mine = features(ranks.rank).requires_grad_()
    alone = dist.new_subgroups(1)[0]
    found = {}
    for name, cp_group in (("cp", dist.group.WORLD), ("tp", alone)):
        all_features = gather_features(
            mine, torch.tensor(ORDER), COUNTS, group=dist.group.WORLD, cp_group=cp_group
        )
        weight = torch.arange(6.0).view(3, 2) + 100 * ranks.rank
        (gradient,) = torch.autograd.grad((all_features * weight).sum(), mine)
        found[f"features {name}"] = all_features.detach()
        found[f"features gradient {name}"] = gradient
    part = torch.tensor([2.0, 3.0]).mul(ranks.rank + 1).requires_grad_()
    total = sum_parts(part, dist.group.WORLD)
    nothing = sum_parts(part[:0], dist.group.WORLD)
    (of_sum,) = torch.autograd.grad(total.square().sum() + nothing.sum(), part)
    found |= {"sum": total.detach(), "of sum": of_sum}
    found |= {"output": output.detach(), "whole": whole.detach(), "of gather": of_gather}
    found |= dict(zip(("query", "key", "value"), gradients, strict=True))
    torch.save(found, folder / f"{ranks.rank}.pt")
    stop_process_group()


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
    query, key, value, factor = drawn_row()
    inputs = [part.requires_grad_() for part in (query, key, value)]
    output = whole_row(SEGMENTS, *inputs)
    return output.detach(), torch.autograd.grad((output * factor).sum(), inputs)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_slices_of_all_ranks_compute_the_row(size, scale, monkeypatch):
    """Ranks one after the other; the gather is the concatenation of their slices."""
    lengths = tuple(2 * size * n for n in (2, 2, 1, 3, 3, 3, 1))
    monkeypatch.setitem(globals(), "SEGMENTS", lengths)
    query, key, value, factor = drawn_row()
    inputs = [part.requires_grad_() for part in (query, key, value)]
    slices = [context_slice(rank, size) for rank in range(size)]
    both = torch.cat([torch.stack((key, value), dim=1)[own.row_index] for own in slices])
    monkeypatch.setattr(attention, "gather_slices", lambda local, order, group: both[order])
    outputs = torch.empty_like(query)
    for own in slices:
        local = [part[own.row_index] for part in inputs]
        output = attention.context_parallel_attention(*local, lengths, own, group=None, scale=scale)
        outputs = outputs.index_copy(0, own.row_index, output)
    found = torch.autograd.grad((outputs * factor).sum(), inputs)
    scaled = query * (scale * WIDTH**0.5) if scale else query
    row = whole_row(lengths, scaled, key, value)
    torch.testing.assert_close(outputs, row)
    for mine, other in zip(found, torch.autograd.grad((row * factor).sum(), inputs), strict=True):
        torch.testing.assert_close(mine, other)


def test_segments_are_split_off_the_row_not_sliced(monkeypatch):
    """The backward of every slice would fill the gathered row with zeros."""
    lengths = tuple(4 * n for n in range(1, 33))
    monkeypatch.setitem(globals(), "SEGMENTS", lengths)
    query, key, value, _ = drawn_row()
    own = context_slice(1, 2)
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
    check_ranks([__file__, folder], 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_two_processes_compute_the_row_forward_and_backward(results, expected):
    output, gradients = expected
    assert len(set(SEGMENTS)) > 1
    assert SEGMENTS[0] == SEGMENTS[1], "a run of equal segments"
    for rank, found in enumerate(results):
        mine = context_slice(rank, 2).row_index
        torch.testing.assert_close(found["output"], output[mine])
        for name, whole in zip(("query", "key", "value"), gradients, strict=True):
            torch.testing.assert_close(found[name], whole[mine])


@pytest.mark.slow
def test_the_gather_restores_the_order_and_its_backward_sums(results):
    tokens = sum(SEGMENTS)
    for found in results:
        assert found["whole"].tolist() == list(range(tokens))
        assert found["of gather"].tolist() == [3.0] * (tokens // 2), "1 from rank 0, 2 from rank 1"


@pytest.mark.slow
def test_features_come_in_image_order_and_gradients_go_home(results):
    """Context-parallel ranks each saw a part, so theirs are summed; tensor-parallel ones all."""
    first = torch.arange(6.0).view(3, 2)
    in_order = features(0)[list(ORDER)]
    for rank, found in enumerate(results):
        for kind, weight in (("tp", first + 100 * rank), ("cp", 2 * first + 100)):
            assert torch.equal(found[f"features {kind}"], in_order)
            gradient = found[f"features gradient {kind}"]
            assert gradient.shape == (COUNTS[rank], 2)
            if rank == 0:
                home = torch.empty_like(weight)
                home[list(ORDER)] = weight
                assert torch.equal(gradient, home)


@pytest.mark.slow
def test_a_sum_of_parts_is_everywhere_and_each_rank_differentiates_its_own(results):
    """As if the other parts were constants: an all-reduce in backward would count them twice."""
    for found in results:
        assert found["sum"].tolist() == [6.0, 9.0]
        assert found["of sum"].tolist() == [12.0, 18.0]


ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
PARAMS = PackedSeqParams(
    cu_seqlens_q=ENDS, cu_seqlens_kv=ENDS, max_seqlen_q=3, max_seqlen_kv=3, segment_lengths=(2, 3)
)
ANGLES = {"cos": torch.ones(5, 4), "sin": torch.zeros(5, 4), "context": None, "deep": ()}


def test_a_row_that_holds_a_prefix_once_is_refused():
    shared = replace(PARAMS, prefix_tree=PrefixTree(parents=(-1, 0), lengths=(2, 3)))
    with pytest.raises(CapabilityError, match=r"holds a shared prefix once .* cannot run"):
        attention.megatron_params(shared, **ANGLES)
    plain = attention.megatron_params(PARAMS, **ANGLES)
    assert plain.row.segment_lengths == (2, 3)


@pytest.mark.parametrize(
    ("layer", "tensors"),
    [(attention.PackedCoreAttention, 3), (PackedGatedDeltaNet, 1), (PackedMamba2, 1)],
)
def test_a_layer_without_the_boundaries_of_its_row_is_refused(layer, tensors):
    ours = attention.megatron_params(PARAMS, **ANGLES)
    row = torch.zeros(5, 1, 8)

    def run(mask, params):
        layer.forward(None, *[row] * tensors, mask, packed_seq_params=params)

    for mask, params in ((torch.ones(5, 5), ours), (None, PARAMS), (None, None)):
        with pytest.raises(ValueError, match="need RowParams and no attention mask"):
            run(mask, params)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        run(None, ours)  # goes on to the parts of the layer, which is none here


if __name__ == "__main__":
    main(Path(sys.argv[1]))
