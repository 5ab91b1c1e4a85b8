"""Run in ranks: optimizer steps of a family's tiny model on two replicas.

    torchrun --nproc-per-node 2 hybrid_replicas.py FOLDER MODEL DEAL;DEAL

Writes FOLDER/<sharding>-<deal>.json (rank 0's loss and gradient norm by step, and what ran) and
.safetensors (whole parameters afterwards). Deals are those of `replicas.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from backends.hf.replicas import DEALS, Deal, whole_weights
from safetensors.torch import save_file
from support.engines import make_engine, make_stepper
from support.shards import mixed_samples

from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator
from vlmpack.training.step import Stepper

STEPS = 4


def stepper_of(model: Path, *, ranks: Ranks | None = None, sharding: str = "none") -> Stepper:
    """A stepper on a model folder as it is on disk."""
    return make_stepper(make_engine(model, Encoder(model), ranks=ranks, sharding=sharding))


def train(stepper: Stepper, model: Path, deal: Deal) -> list[list[float]]:
    """(loss, gradient norm) by step."""
    encoder = Encoder(model)
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id,
        num_position_axes=encoder.num_position_axes,
        pad_to_multiple_of=8,
    )
    samples = [encoder.encode(sample.cooked()) for sample in mixed_samples()]
    rows = []
    for step in range(STEPS):
        bins = deal[stepper.ranks.dp_rank]
        batches = [collate([samples[index] for index in bin_]) for bin_ in bins]
        sums, _ = stepper.train(step, batches, num_skipped=0, stop=False)
        assert sums.num_samples == len(samples)
        rows.append([sums.loss, sums.grad_norm])
    return rows


def main(folder: Path, model: Path, deals: list[str]) -> None:
    """Every deal, replicated and sharded."""
    ranks = start_process_group()
    for sharding in ("none", "fsdp"):
        for name in deals:
            stepper = stepper_of(model, ranks=ranks, sharding=sharding)
            rows = train(stepper, model, DEALS[name])
            weights = whole_weights(stepper)
            if ranks.is_main:
                result = {"rows": rows, **stepper.engine.description}
                path = folder / f"{sharding}-{name}.json"
                path.write_text(json.dumps(result), encoding="utf-8")
                save_file(weights, str(folder / f"{sharding}-{name}.safetensors"))
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(";"))
