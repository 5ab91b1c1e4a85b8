"""Run in ranks: context-parallel attention, the two gathers and the sum over gloo.

    torchrun --nproc-per-node 2 collectives_worker.py FOLDER

Writes FOLDER/<rank>.pt: forward results and gradients of this rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from vlmpack.backends.mcore.attention import context_parallel_attention
from vlmpack.backends.mcore.collectives import gather_features, gather_slices, sum_parts
from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.packing import ContextSlice
from vlmpack.packing.context import zigzag_index

SEGMENTS = (8, 8, 4, 12, 12, 12, 4, 8)
HEADS, GROUPS, WIDTH = 4, 2, 8
COUNTS = (3, 0)
"""Image features by rank: the second rank has none."""
ORDER = (2, 0, 1)


def row() -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        targets=nothing,
    )


def features(rank: int) -> Tensor:
    """This rank's image features."""
    return 10.0 * rank + torch.arange(2.0 * COUNTS[rank]).view(-1, 2)


def main(folder: Path) -> None:
    """Everything, on each rank."""
    ranks = start_process_group(context=2)
    own = context_slice(ranks.rank, 2)
    local = [part[own.row_index].requires_grad_() for part in row()[:3]]
    output = context_parallel_attention(*local, SEGMENTS, own, group=dist.group.WORLD)
    gradients = torch.autograd.grad((output * row()[3][own.row_index]).sum(), local)

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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
