"""Gradients of a mixture of experts with its load-balancing loss, on two replicas.

Run as: router_loss_worker.py MODEL FOLDER, in each process; the main one writes
FOLDER/{none,fsdp}.safetensors, and in .json beside what a step reports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from support import layouts
from support.engines import make_engine, make_stepper
from torch.distributed.tensor import DTensor

from vlmpack.distributed import start_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator
from vlmpack.training.objective import forward_step

AUX_LOSS = 0.01
COLLATE = PackCollator(
    pad_token_id=layouts.PAD, num_position_axes=3, pad_to_multiple_of=16, total_multiple_of=64
)


def rows(model: Path) -> list:
    """The micro-batches of a step; some rows have no image."""
    samples = layouts.samples(model)
    return [COLLATE([samples[index] for index in bin_]) for bin_ in layouts.BINS]


def main(model: Path, folder: Path) -> None:
    """Two micro-batches each, accumulated and reduced."""
    ranks = start_process_group()
    mine = rows(model)[ranks.dp_rank :: ranks.dp_size]
    assert len(mine) == 2
    for sharding in ("none", "fsdp"):
        engine = make_engine(
            model, Encoder(model), ranks=ranks, aux_loss=AUX_LOSS, sharding=sharding
        )
        engine.zero_gradients()
        engine.forward_backward(forward_step, iter(mine), num_microbatches=len(mine))
        engine.finish_gradients(torch.tensor(7.0), None)
        whole = {
            name: (
                p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            ).contiguous()
            for name, p in engine.parameters()
        }
        stepper = make_stepper(engine)
        stepper.schedule = lambda step: 0.0
        sums, _ = stepper.train(0, mine, num_skipped=0, stop=False)
        if ranks.is_main:
            save_file(whole, str(folder / f"{sharding}.safetensors"))
            reported = json.dumps(stepper.reported(sums))
            (folder / f"{sharding}.json").write_text(reported, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
