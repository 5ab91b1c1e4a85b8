"""Run in ranks: optimizer steps on two replicas, every way of dealing the samples out.

    torchrun --nproc-per-node 2 replicas.py FOLDER DEAL;DEAL [MODEL STEPS]

Writes FOLDER/<sharding>-<deal>.json (rank 0's loss and gradient norm by step, and what ran) and
.safetensors (whole parameters afterwards). Where there is FOLDER/one/, the checkpoint of one
process of the tiny model, it is resumed too: FOLDER/<sharding>/ (checkpoints) with
round-trip-<sharding>.json, FOLDER/failed-save-<rank>.json and FOLDER/non-finite-<rank>.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.checkpoints import content_of, save_engine
from support.engines import make_engine, make_stepper
from support.shards import TINY_MODEL, mixed_samples
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import CheckpointError, NonFiniteError
from vlmpack.packing import EncodedSample, PackCollator
from vlmpack.training.checkpoint import Saver, load_checkpoint, step_folder
from vlmpack.training.objective import forward_step
from vlmpack.training.step import Stepper

STEPS = 5
STEPS_AFTER = 3
"""Steps that a resumed run is followed for."""
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


def encoded_samples(model: Path = TINY_MODEL) -> list[EncodedSample]:
    """The mixed samples."""
    encoder = Encoder(model)
    return [encoder.encode(sample.cooked()) for sample in mixed_samples()]


def collator(model: Path) -> PackCollator:
    """As `COLLATE`, for another model."""
    encoder = Encoder(model)
    axes = encoder.num_position_axes
    return replace(COLLATE, pad_token_id=encoder.pad_token_id, num_position_axes=axes)


def train(
    stepper: Stepper,
    deal: Deal,
    samples: list[EncodedSample],
    *,
    start: int = 0,
    count: int = STEPS,
    collate: PackCollator = COLLATE,
) -> list[list[float]]:
    """(loss, gradient norm) by step."""
    rows = []
    for step in range(start, start + count):
        mine = deal[stepper.ranks.dp_rank]
        batches = [collate([samples[index] for index in bin_]) for bin_ in mine]
        sums, _ = stepper.train(step, batches, num_skipped=0, stop=False)
        assert sums.num_samples == len(samples)
        rows.append([sums.loss, sums.grad_norm])
    return rows


def train_on(stepper: Stepper, deal: Deal, samples: list[EncodedSample]) -> list[list[float]]:
    """The steps after a checkpoint."""
    return train(stepper, deal, samples, start=STEPS, count=STEPS_AFTER)


def whole_weights(stepper: Stepper) -> dict[str, Tensor]:
    """Copies of all parameters, shards put together. Collective."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in stepper.engine.parameters()
    }


def fresh(sharding: str, ranks: Ranks | None = None, model: Path = TINY_MODEL) -> Stepper:
    """A stepper on a model folder as it is on disk."""
    return make_stepper(make_engine(model, Encoder(model), ranks=ranks, sharding=sharding))


def resumed(sharding: str, folder: Path, ranks: Ranks) -> Stepper:
    """A stepper that goes on from a checkpoint."""
    stepper = fresh(sharding, ranks)
    load_checkpoint(folder, stepper.engine, ranks)
    return stepper


def round_trip(
    sharding: str, stepper: Stepper, deal: Deal, samples: list[EncodedSample], folder: Path
) -> dict[str, Any]:
    """Save, load into a fresh stepper, save that; train on with both.

    The first is saved in the background and published after a step, so it must hold a copy. It is
    saved right after a pass without backward, as after a validation.
    """
    stepper.engine.forward_backward(
        forward_step, iter([COLLATE(samples)]), num_microbatches=1, forward_only=True
    )
    ranks, roots = stepper.ranks, [folder / f"{sharding}{suffix}" for suffix in ("", "-again")]
    saver = Saver(roots[0], ranks, keep=1)
    stepper.before_update = saver.wait_for_copy
    saver.save_in_background(content_of(stepper.engine, STEPS), stepper.engine.owned_slices)
    owned = [list(box.lengths) for _, box, _ in stepper.engine.owned_slices()]
    steps = train_on(stepper, deal, samples)
    saver.finish()
    again = resumed(sharding, step_folder(roots[0], STEPS), ranks)
    save_engine(roots[1], STEPS, again.engine, keep=1, ranks=ranks)
    result = {
        "type": type(stepper.engine.parameters()[0][1]).__name__,
        "owned": ranks.gather_objects(owned),
        "steps": steps,
        "steps_again": train_on(again, deal, samples),
    }
    other = resumed(sharding, step_folder(folder / "one", STEPS), ranks)
    result["steps_from_one"] = train_on(other, deal, samples)
    return result


def failed_save(stepper: Stepper, folder: Path) -> str:
    """What each rank is told when rank 1 alone cannot write."""
    ranks, engine = stepper.ranks, stepper.engine
    root = folder / "failed"
    save_engine(root, 1, engine, keep=1, ranks=ranks)

    def owned() -> Any:
        yield from engine.owned_slices()
        if ranks.rank == 1:
            raise OSError(28, "No space left on device")

    saver = Saver(root, ranks, keep=1)
    try:
        saver.save(content_of(engine, 2), owned)
    except CheckpointError as error:
        return str(error)
    return "no error"


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


def main(folder: Path, deals: list[str], model: Path = TINY_MODEL, count: int = STEPS) -> None:
    """Every deal; the other scenarios where there is a checkpoint to resume."""
    ranks = start_process_group()
    samples, collate = encoded_samples(model), collator(model)
    for sharding in ("none", "fsdp"):
        for name in deals:
            stepper = fresh(sharding, ranks, model)
            rows = train(stepper, DEALS[name], samples, count=count, collate=collate)
            weights = whole_weights(stepper)
            if ranks.is_main:
                result = {"rows": rows, **stepper.engine.description}
                (folder / f"{sharding}-{name}.json").write_text(json.dumps(result))
                save_file(weights, str(folder / f"{sharding}-{name}.safetensors"))
        if not (folder / "one").is_dir():
            continue
        result = round_trip(sharding, stepper, DEALS[deals[-1]], samples, folder)
        if ranks.is_main:
            (folder / f"round-trip-{sharding}.json").write_text(json.dumps(result))
    if (folder / "one").is_dir():
        message = failed_save(stepper, folder)
        (folder / f"failed-save-{ranks.rank}.json").write_text(json.dumps(message))
        message = non_finite(ranks, samples)
        (folder / f"non-finite-{ranks.rank}.json").write_text(json.dumps(message))
    stop_process_group()


if __name__ == "__main__":
    given, named, *of_another = sys.argv[1:]
    other = (Path(of_another[0]), int(of_another[1])) if of_another else ()
    main(Path(given), named.split(";"), *other)
