"""Run under torchrun: optimizer steps on two replicas, every way of dealing the samples out.

    torchrun --nproc-per-node 2 replicas.py FOLDER

Writes FOLDER/<sharding>-<deal>.json (rank 0's loss and gradient norm by step) and .safetensors
(whole parameters afterwards), FOLDER/round-trip.json and FOLDER/non-finite-<rank>.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.engines import make_engine, make_stepper
from support.shards import TINY_MODEL, mixed_samples

from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.errors import NonFiniteError
from vlmpack.families import Encoder
from vlmpack.packing import EncodedSample, PackCollator
from vlmpack.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    random_state,
    save_checkpoint,
)
from vlmpack.training.step import Stepper
from vlmpack.training.weights import gather_weights, load_weights

STEPS = 5
COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)

Deal = list[list[list[int]]]
"""By rank, by micro-batch: indices into `mixed_samples()`. Samples 1 and 4 are text-only."""

DEALS: dict[str, Deal] = {
    "one each": [[[0, 1, 2]], [[3, 4, 5]]],
    "image-less rank, empty bin": [[[0, 2], [3, 5]], [[1, 4], []]],
    "image-less rank": [[[0, 2], [3, 5]], [[1], [4]]],
    "empty bin": [[[0, 1], [2, 3]], [[4, 5], []]],
    "three uneven": [[[0], [1], [2]], [[3, 4], [], [5]]],
    "empty rank": [[[0, 1, 2], [3, 4, 5]], [[], []]],
}


def encoded_samples() -> list[EncodedSample]:
    """The mixed samples."""
    encoder = Encoder(TINY_MODEL)
    return [encoder.encode(sample.cooked()) for sample in mixed_samples()]


def train(stepper: Stepper, deal: Deal, samples: list[EncodedSample]) -> list[list[float]]:
    """(loss, gradient norm) by step."""
    rows = []
    for step in range(STEPS):
        mine = deal[stepper.ranks.dp_rank]
        batches = [COLLATE([samples[index] for index in bin_]) for bin_ in mine]
        sums, _ = stepper.train(step, batches, num_skipped=0, stop=False)
        assert sums.num_samples == len(samples)
        rows.append([sums.loss, sums.grad_norm])
    return rows


def fresh(sharding: str, ranks: Ranks) -> Stepper:
    """A stepper on the tiny model as it is on disk."""
    engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL), ranks=ranks, sharding=sharding)
    return make_stepper(engine)


def round_trip(stepper: Stepper, samples: list[EncodedSample], folder: Path) -> dict[str, Any]:
    """gather_weights -> checkpoint -> load_weights into a fresh sharded stepper, then a step."""
    ranks = stepper.ranks
    model, optimizer = gather_weights(stepper)
    saved = Checkpoint(model=model, optimizer=optimizer, random=random_state(), state={})
    ranks.on_main(lambda: save_checkpoint(folder / "checkpoints", STEPS, saved, keep=1))
    again = fresh("fsdp", ranks)
    load_weights(again, load_checkpoint(folder / "checkpoints" / f"step-{STEPS:08d}"))
    model_again, optimizer_again = gather_weights(again)
    batches = [COLLATE(samples[ranks.rank :: 2])]
    steps = [s.train(STEPS, batches, num_skipped=0, stop=False)[0] for s in (stepper, again)]
    return {
        "parameters": len(model),
        "moments": len(optimizer),
        "sharded": type(stepper.engine.parameters()[0][1]).__name__,
        "equal": sum(torch.equal(model_again[name], value) for name, value in model.items()),
        "moments_equal": sum(
            torch.equal(optimizer_again[name], value) for name, value in optimizer.items()
        ),
        "steps": [[s.loss, s.grad_norm] for s in steps],
    }


def non_finite(ranks: Ranks, samples: list[EncodedSample]) -> str:
    """What each rank is told when rank 1 alone has a bad image."""
    bad = samples[3]
    pixels = torch.full_like(bad.media.pixel_values, float("nan"))
    bad = replace(bad, media=replace(bad.media, pixel_values=pixels))
    stepper = fresh("none", ranks)
    batches = [COLLATE([samples[0]] if ranks.rank == 0 else [bad])]
    try:
        stepper.train(0, batches, num_skipped=0, stop=False)
    except NonFiniteError as error:
        return str(error)
    return "no error"


def main(folder: Path, deals: list[str]) -> None:
    """Every scenario."""
    ranks = start_process_group()
    samples = encoded_samples()
    for sharding in ("none", "fsdp"):
        for name in deals:
            stepper = fresh(sharding, ranks)
            rows = train(stepper, DEALS[name], samples)
            model, _ = gather_weights(stepper)
            if ranks.is_main:
                result = {"rows": rows, "processes": stepper.engine.description["processes"]}
                (folder / f"{sharding}-{name}.json").write_text(json.dumps(result))
                save_file(model, str(folder / f"{sharding}-{name}.safetensors"))
    result = round_trip(stepper, samples, folder)
    if ranks.is_main:
        (folder / "round-trip.json").write_text(json.dumps(result))
    message = non_finite(ranks, samples)
    (folder / f"non-finite-{ranks.rank}.json").write_text(json.dumps(message))
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(";"))
