"""Run in ranks: what the collectives of an optimizer step move, by layout.

    torchrun --nproc-per-node N traffic.py FOLDER LAYOUT [LAYOUT ...]

FOLDER/<family> is a model folder of a layout that begins with one of `FAMILIES`; the others are of
the committed tiny model. Writes FOLDER/<layout>.json, by rank: collectives in a step as [group,
kind, calls, bytes], and what a forecast needs of the micro-batches. Bytes are those of the whole
tensor, before any algorithm: what an all-gather makes, what a reduce-scatter is given.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.layouts import Layout, make_megatron, one_layout, stepper_with, train
from support.of_all_ranks import write_of_all_ranks
from support.shards import TINY_MODEL
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmpack.distributed import Ranks, stop_process_group

LAYOUTS = {
    "tp2": Layout(tensor=2),
    "tp2-sp": Layout(tensor=2, sequence=True),
    "tp2-sp-full": Layout(tensor=2, sequence=True, recompute="full"),
    "tp2-full": Layout(tensor=2, recompute="full"),
    "cp2": Layout(context=2, distributed=True),
    "pp2": Layout(pipeline=2, distributed=True),
    "dp2": Layout(dp=2, distributed=True),
    "dp2-replicated": Layout(dp=2),
    # 0.16 gathers parameters twice where there are experts, but for overlap.
    "qwen3_vl_moe-ep2": Layout(dp=2, expert=2, distributed=True, overlap=True),
    "qwen3_5-tp2-sp": Layout(tensor=2, sequence=True, recompute="full"),
    "qwen3_5-cp2": Layout(context=2, distributed=True, recompute="full"),
    "nemotron_h-tp2-ep2": Layout(tensor=2, sequence=True, expert=2, recompute="full"),
    "nemotron_h-cp2": Layout(context=2, recompute="full"),
}
FAMILIES = ("qwen3_vl_moe", "qwen3_5", "nemotron_h")


def model_of(name: str, folder: Path) -> Path:
    """The model folder of a layout."""
    family = name.partition("-")[0]
    return folder / family if family in FAMILIES else TINY_MODEL


GROUPS = {
    "dp_cp": "DP x CP",
    "tp": "TP",
    "cp": "CP",
    "cp_heads": "CP heads",
    "cp_ring": "CP ring",
    "pp": "PP",
    "ep": "EP",
    "tp_cp": "TP x CP",
    "expt_dp": "experts' DP",
    "embd": "head and embedding",
}
KINDS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "send": ("send", 0),
}
"""By operator: the kind, and which argument is whole."""

SMALL = 560
"""Bytes up to which a message is no traffic: sums of losses, of rows with up to 140 labels, norms,
votes. All sends are counted."""


class Traffic(TorchDispatchMode):
    """Counts collectives of more than `SMALL` bytes by group and kind."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        named = {key: getattr(engine.groups, key, None) for key in GROUPS}
        self.names = {
            group.group_name: name
            for key, name in reversed(GROUPS.items())
            if (group := named[key]) is not None and group.size() > 1
        }
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ in KINDS:
            kind, place = KINDS[func.overloadpacket.__name__]
            size = sum(t.nbytes for t in tree_leaves(args[place]) if isinstance(t, Tensor))
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            if (size > SMALL or kind == "send") and group.size() > 1:
                key = (self.names.get(group.group_name, "?"), kind)
                self.calls[key] += 1
                self.bytes[key] += size
        return func(*args, **(kwargs or {}))


def run(name: str, ranks: Ranks, folder: Path) -> None:
    """The second step of a layout, counted."""
    layout = LAYOUTS[name]
    model = model_of(name, folder)
    engine = make_megatron(layout, ranks, model)
    stepper = stepper_with(engine, "adamw")
    train(stepper, layout, 1, model)
    rows: list[tuple[int, int, int]] = []
    prepare = engine.prepare

    def noted(batch: Any) -> Any:
        features = 0 if batch.media_positions is None else batch.media_positions.numel()
        share = prepare(batch)
        each = share.media_part
        widest = max(each.counts) * len(each.counts) if each is not None else 0
        rows.append((batch.input_ids.numel(), features, widest))
        return share

    engine.prepare = noted
    with Traffic(engine) as traffic:
        train(stepper, layout, 1, model)
    sent = [[*key, calls, traffic.bytes[key]] for key, calls in traffic.calls.items()]
    write_of_all_ranks({"traffic": sent, "rows": rows}, folder / f"{name}.json", ranks)
    dist.barrier()


def main(folder: Path, names: list[str]) -> None:
    """One layout after the other."""
    for name in names:
        with one_layout(LAYOUTS[name]) as ranks:
            run(name, ranks, folder)
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
