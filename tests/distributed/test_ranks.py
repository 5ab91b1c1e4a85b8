"""Where each process stands: rank = tp + TP * (cp + CP * (dp + DP * pp))."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from vlmpack.distributed import Ranks, start_process_group, world_size_from_environment
from vlmpack.errors import CapabilityError


@pytest.fixture
def place(monkeypatch):
    """The Ranks of each process of a world, and the subgroups that it asked for."""

    def of(world_size, **sizes):
        asked = []

        def new_subgroups(members, backend):
            asked.append((members, backend))
            return "group", None

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "new_subgroups_by_enumeration", new_subgroups)
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        found = []
        for rank in range(world_size):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("LOCAL_RANK", "0")
            found.append(start_process_group(**sizes))
        return found, asked

    return of


SIZES = [(tp, cp, pp, dp) for tp, cp, pp, dp in product((1, 2, 4), (1, 2), (1, 2, 3), (1, 2, 3))]


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), SIZES)
def test_ranks_are_laid_out_as_megatron_lays_them_out(place, tp, cp, pp, dp):
    world = tp * cp * pp * dp
    found, asked = place(world, tensor=tp, context=cp, pipeline=pp)
    replicas = [[] for _ in range(dp)]
    for p, d, c, t in product(range(pp), range(dp), range(cp), range(tp)):
        rank = t + tp * (c + cp * (d + dp * p))
        assert found[rank].dp_rank == d
        replicas[d].append(rank)
    for members in replicas:
        for number, rank in enumerate(sorted(members)):
            ranks = found[rank]
            assert (ranks.rank, ranks.world_size) == (rank, world)
            assert (ranks.dp_size, ranks.replica_size) == (dp, tp * cp * pp)
            assert ranks.replica_rank == number
            assert ranks.is_lead == (number == 0)
            assert ranks.stage_size == tp * cp
            first = [t + tp * (c + cp * ranks.dp_rank) for c in range(cp) for t in range(tp)]
            assert ranks.image_rank == (first.index(rank) if rank in first else None)
            assert (ranks.replica_group == "group") == (tp * cp * pp > 1)
    if tp * cp * pp == 1:
        assert asked == [], "a replica of one process needs no group"
    else:
        # Every process creates the groups of all replicas, in the same order.
        # Two of each: for the training thread, and for one that reads ahead.
        assert asked == [([sorted(members) for members in replicas], "gloo")] * (2 * world)
        assert all(ranks.ahead.replica_group == "group" for ranks in found)
    assert [ranks.is_main for ranks in found] == [True] + [False] * (world - 1)
    assert sum(ranks.is_lead for ranks in found) == dp


@pytest.mark.parametrize(("world", "sizes"), [(3, (2, 1, 1)), (6, (2, 2, 1)), (2, (2, 1, 2))])
def test_a_world_that_does_not_divide_names_every_number(place, world, sizes):
    tensor, context, pipeline = sizes
    message = (
        f"{world} processes, expected a multiple of tensor {tensor} x context {context} x "
        f"pipeline {pipeline} = {tensor * context * pipeline}"
    )
    with pytest.raises(CapabilityError, match=message):
        place(world, tensor=tensor, context=context, pipeline=pipeline)


def test_one_process_alone_shares_with_itself(one_rank: Ranks):
    assert one_rank.is_main
    assert one_rank.is_lead
    assert one_rank.gather_in_replica(torch.tensor([7])) == [torch.tensor([7])]
    assert one_rank.gather_objects_in_replica({"a": 1}) == [{"a": 1}]
    assert (one_rank.image_rank, one_rank.stage_size) == (0, 1)


@pytest.mark.parametrize("text", ["\N{SUPERSCRIPT TWO}", "", "0", "-1", "2.0", "9" * 5000])
def test_a_world_size_that_is_no_count_is_named(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(CapabilityError, match="expected a positive integer"):
        world_size_from_environment()


def test_a_world_size_is_read(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "016")
    assert world_size_from_environment() == 16
