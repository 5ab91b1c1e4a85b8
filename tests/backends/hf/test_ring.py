"""What ranks of a ring see of one another's keys, what they compute, and how rows are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from attention.test_prefix_calls import Plain
from support.shards import TINY_MODEL
from torch import Tensor

from vlmpack.attention import AttentionChoice, VarlenAttention, segment_attention
from vlmpack.attention.prefix_attention import merge_lse
from vlmpack.backends.hf import attention, ring
from vlmpack.backends.hf.ring import (
    Sight,
    TiledKernel,
    cuts_by_row,
    held_runs,
    work_of_ranks,
)
from vlmpack.forecast.communication import StepRows, traffic_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.packing import CostModel, PackedSeqParams, balance, zigzag_index
from vlmpack.recipe.schema import ModelSection, ParallelismSection

ROWS = ((96,), (16, 64, 32, 16), (8, 8, 8, 8, 8, 8), (16,) * 3 + (48,), (128, 16))
CPU = torch.device("cpu")


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    """(T,) int64, where the segment of each slot starts."""
    ends = torch.tensor(lengths)
    return (ends.cumsum(0) - ends).repeat_interleave(ends)


def held(lengths: tuple[int, ...], size: int, by_row: bool) -> list[Tensor]:
    """Slots of each rank."""
    cut = (sum(lengths),) if by_row else lengths
    return [zigzag_index(cut, rank=rank, size=size) for rank in range(size)]


def seen(lengths: tuple[int, ...], window: int | None) -> Tensor:
    """(T, T) bool, by the definition."""
    starts, slots = starts_of(lengths), torch.arange(sum(lengths))
    behind = slots[:, None] - slots
    mask = (starts[:, None] == starts) & (behind >= 0)
    return mask if window is None else mask & (behind < window)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("lengths", ROWS)
def test_ranks_see_what_the_row_shows(lengths, window, by_row, size) -> None:
    """All of it, each key once, and no key is sent that no query sees."""
    slots, starts = held(lengths, size, by_row), starts_of(lengths)
    found = torch.zeros(sum(lengths), sum(lengths), dtype=torch.int64)
    for reader in slots:
        for owner in slots:
            sight = Sight.of(reader, owner, starts, window, CPU)
            keys, sent = owner[sight.keys], set()
            for query, first, last in zip(sight.queries, sight.first, sight.last, strict=True):
                found[reader[query], keys[first:last]] += 1
                sent.update(range(int(first), int(last)))
            assert len(sent) == len(keys)
    assert torch.equal(found, seen(lengths, window).long())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("lengths", ROWS)
def test_the_cost_model_counts_what_is_seen_and_read(lengths, by_row, size) -> None:
    slots, starts = held(lengths, size, by_row), starts_of(lengths)
    mask = seen(lengths, None)
    for rank, (cells, read) in enumerate(work_of_ranks(lengths, size=size, by_row=by_row)):
        assert cells == int(mask[slots[rank]].sum())
        others = [owner for owner in slots if owner is not slots[rank]]
        sights = [Sight.of(slots[rank], owner, starts, None, CPU) for owner in others]
        assert read == sum(len(sight.keys) for sight in sights)
        runs = sorted(held_runs(lengths, rank=rank, size=size, by_row=by_row))
        assert torch.equal(
            torch.cat([torch.arange(start, stop) for _, start, stop in runs]), slots[rank]
        )


def params_of(lengths: tuple[int, ...]) -> PackedSeqParams:
    """The row's boundaries."""
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return PackedSeqParams(
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        segment_lengths=lengths,
    )


def by_steps(
    qkv: Sequence[Tensor],
    grad: Tensor,
    lengths: tuple[int, ...],
    kernel: object,
    *,
    by_row: bool = True,
    window: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs, and gradients of queries, keys and values, by the steps of four ranks."""
    query, pairs = qkv[0].detach(), torch.cat([part.detach() for part in qkv[1:]], dim=-1)
    step = ring._Step(kernel, query.shape[1] // pairs.shape[1], query.shape[-1] ** -0.5)
    slots, starts = held(lengths, 4, by_row), starts_of(lengths)
    out = torch.zeros_like(query)
    of_query, of_pairs = (torch.zeros_like(ring._wide(part)) for part in (query, pairs))
    for number, reader in enumerate(slots):
        owners = [reader, *slots[:number], *slots[number + 1 :]]
        sights = [
            (owner, Sight.of(reader, owner, starts, window, query.device)) for owner in owners
        ]
        steps = [
            (
                one,
                *(
                    rank.to(query.device)[at]
                    for rank, at in ((reader, one.queries), (owner, one.keys))
                ),
            )
            for owner, one in sights
        ]
        (own, mine, keys), *others = [one for one in steps if len(one[1])]
        merged = step.forward(query[mine], pairs[keys], own)
        for sight, at, keys in others:
            part = step.forward(query[at], pairs[keys], sight)
            merged = merge_lse(merged, part, sight.queries)
        out[mine] = merged[0].to(out.dtype)
        of = grad[mine], out[mine], merged[1].T
        for sight, at, keys in [(own, mine, mine), *others]:
            first, second = step.backward(query[at], pairs[keys], sight, sight.of_queries(*of))
            of_query.index_add_(0, at, first)
            of_pairs.index_add_(0, keys, second)
    return out, (of_query, *of_pairs.chunk(2, dim=-1))


@pytest.mark.parametrize(
    ("kernel", "tile", "window"),
    [
        (TiledKernel(), 512, None),
        (TiledKernel(), 3, None),
        (TiledKernel(), 512, 9),
        (TiledKernel(), 3, 9),
        (Plain(), 512, None),
    ],
)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("lengths", ROWS)
def test_merged_steps_are_attention(lengths, by_row, kernel, tile, window, monkeypatch) -> None:
    """Outputs, and gradients of all inputs, in float64. Two query heads share one of keys. The last
    kernel knows boundaries alone, as those of CUDA do."""
    monkeypatch.setattr(ring, "TILE", tile)
    torch.manual_seed(0)
    whole = [
        torch.randn(sum(lengths), heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    expected = segment_attention(*whole, params_of(lengths), window=window)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    out, gradients = by_steps(whole, grad, lengths, kernel, by_row=by_row, window=window)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    for ours, part in zip(gradients, whole, strict=True):
        torch.testing.assert_close(ours, part.grad, rtol=1e-11, atol=1e-11)


def test_a_ring_computes_by_what_the_recipe_asks_for() -> None:
    """`model.attention: segments` takes no kernel there either."""
    asked: list[str | None] = []

    def around(attention: VarlenAttention, kernel: str | None) -> VarlenAttention:
        asked.append(kernel)
        return attention

    part, params = torch.zeros(1, 2, 16, 8), params_of((16,))
    for name in ("segments", "torch_varlen", "flash_attn"):
        choice = AttentionChoice(name, segment_attention, "as the recipe asks")
        given = {"packed_seq_params": params, "head_exchange": SimpleNamespace(around=around)}
        attention._attend(choice, torch.nn.Module(), part, part, part, None, **given)
    assert asked == [None, "torch_varlen", "flash_attn"]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_segment_that_fills_the_row_costs_all_the_same(size) -> None:
    cells = [cells for cells, _ in work_of_ranks((4096,), size=size, by_row=True)]
    assert max(cells) <= 1.05 * min(cells)
    in_order = [
        sum((stop - start) * (start + stop) // 2 for _, start, stop in [(0, c, c + 4096 // size)])
        for c in range(0, 4096, 4096 // size)
    ]
    assert max(in_order) > 1.4 * min(in_order)  # what the bound would find


@pytest.mark.parametrize(("size", "degree"), [(2, 1), (8, 2), (8, 1)])
def test_plan_says_what_a_ring_sends_of_a_segment_that_fills_the_row(size, degree) -> None:
    """The mean of the ranks, over three rows."""
    sizes = read_sizes(TINY_MODEL)
    layers, width = len(sizes.decoder), sum(layer.key for layer in sizes.decoder)
    model = ModelSection(path=str(TINY_MODEL), dtype="bfloat16", activation_checkpointing="full")
    split = ParallelismSection(context=size, context_heads=degree)
    rows = StepRows(micro_batches=3, slots=3 * 4096, features=0)
    figures = traffic_figures(model, split, sizes, rows, world_size=size)
    assert figures is not None
    (part,) = (part for part in figures.parts if part.what == "keys and values")
    places = size // degree
    read = [read for _, read in work_of_ranks((4096,), size=places, by_row=True)]
    passes = 4  # forward, again, backward, and gradients
    assert part.num_bytes == 3 * passes * 2 * 2 * width / degree * sum(read) / places
    assert part.calls == 3 * layers * passes * (places - 1)
    assert any(f"ring of {places}" in note for note in figures.notes)


def slowest_of_mean(rows: list[tuple[int, ...]], size: int, slot: float, by_row=None) -> float:
    """What ranks wait for in each row, over what they do on average; the rows one by one."""
    slowest = mean = 0.0
    for lengths in rows:
        chosen = cuts_by_row(lengths, size=size, slot=slot) if by_row is None else by_row
        work = work_of_ranks(lengths, size=size, by_row=chosen)
        costs = [cells + slot * read for cells, read in work]
        slowest, mean = slowest + max(costs), mean + sum(costs) / size
    return slowest / mean


def random_rows(size: int) -> list[tuple[int, ...]]:
    """Rows of segments of 64 to 32,768 tokens; the last has one of half its tokens."""
    draw, rows = random.Random(0), []
    for _ in range(200):
        lengths: list[int] = []
        while sum(lengths) < 65_536:
            lengths.append(16 * size * max(1, round(2 ** draw.uniform(6, 15) / 16 / size)))
        rows.append(tuple(lengths))
    return [*rows, (32_768, *(2_048,) * 16)]


@pytest.mark.parametrize("slot", [0.0, 285.0])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_rank_waits_long_for_the_slowest(size, slot) -> None:
    rows = random_rows(size)
    assert slowest_of_mean(rows, size, slot) <= 1.25
    assert slowest_of_mean(rows[-1:], size, slot) <= 1.25


def test_each_cut_is_chosen_where_it_ends_earlier() -> None:
    """Many short segments go whole to one rank. A long one among them does not."""
    assert cuts_by_row((64,) * 64, size=4, slot=285.0)
    assert not cuts_by_row((32_768, *(2_048,) * 16), size=4, slot=285.0)
    rows = random_rows(4)
    chosen = {cuts_by_row(lengths, size=4, slot=2_000.0) for lengths in rows}
    assert chosen == {False, True}
    assert slowest_of_mean(rows[-1:], 4, 285.0, by_row=True) > 1.25  # one cut alone does not do


@pytest.mark.parametrize(
    ("size", "slot", "more"),
    [(2, 285.0, 1e-3), (4, 285.0, 1e-3), (8, 285.0, 1e-3), (8, 1143.0, 0.02)],
)
def test_the_cost_model_deals_rows_by_what_a_ring_computes(size, slot, more) -> None:
    """Squared lengths leave out what no segment crosses, and so does a ring. Eight replicas that
    get their rows by these wait no longer than if the ring's own cost had dealt them."""
    cost = CostModel(per_token=6 * 7e9, per_squared_length=6 * 36 * 4096)  # of an 8B model
    rows = random_rows(size)[:192]
    tokens, squares = (np.array([sum(n**of for n in row) for row in rows]) for of in (1, 2))
    counted = cost(tokens, squares, 0 * tokens).sum(axis=1)
    slowest = [
        max(cells + slot * read for cells, read in work_of_ranks(row, size=size, by_row=by_row))
        for row in rows
        for by_row in [cuts_by_row(row, size=size, slot=slot)]
    ]
    on_ring = cost.per_token * tokens + cost.per_squared_length * 2 * size * np.array(slowest)

    def waits(by: npt.NDArray[np.float64]) -> float:
        """The slowest replica over the mean, on average over global batches of 16 rows."""
        batches = zip(by.reshape(-1, 16), on_ring.reshape(-1, 16), strict=True)
        loads = [whole[balance(one, 8)].sum(axis=1) for one, whole in batches]
        return float(np.mean([load.max() / load.mean() for load in loads]))

    assert waits(counted) <= waits(on_ring) + more
    assert (
        waits(cost.per_token * tokens + cost.per_squared_length * tokens**2) > waits(on_ring) + 0.03
    )
