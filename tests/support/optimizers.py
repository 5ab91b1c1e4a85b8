"""Steps of the tiny model with each optimizer of the hf engine, on any device.

    python -m support.optimizers FOLDER     (bitsandbytes on the path; writes FOLDER/found.json)

Of what is asked there, `test_optimizers.py` and `tests/gpu` say what must hold.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import save_engine
from support.engines import make_engine, make_stepper, single_rank
from support.shards import TINY_MODEL, mixed_samples
from torch import Tensor

from vlmpack.backends.policy import TrainingPolicy
from vlmpack.encode import Encoder
from vlmpack.forecast.trained import trained_sizes
from vlmpack.packing import pack_batch_sequences
from vlmpack.recipe.trainable import (
    FACTS,
    LoraSection,
    OptimizerName,
    OptimSection,
    TrainableSection,
)
from vlmpack.training.checkpoint import load_checkpoint, step_folder

STEPS = 4
FULL = TrainableSection()
LORA = TrainableSection(vision="frozen", language="lora", lora=LoraSection(rank=64))


def policy(name: OptimizerName, trainable: TrainableSection) -> TrainingPolicy:
    """Rates that differ by component, and decay."""
    optim = OptimSection(
        name=name, lr=1e-3, projector_lr=3e-3, schedule="constant", weight_decay=0.1
    )
    return TrainingPolicy(trainable=trainable, optim=optim)


def new_engine(
    name: OptimizerName, device: torch.device, trainable: TrainableSection = FULL
) -> Any:
    """An engine on the tiny model."""
    ranks = replace(single_rank(), device=device)
    return make_engine(TINY_MODEL, Encoder(TINY_MODEL), ranks=ranks, policy=policy(name, trainable))


def take_steps(engine: Any, count: int, start: int = 0) -> None:
    """Optimizer steps on the same row."""
    encoder = Encoder(TINY_MODEL)
    samples = [encoder.encode(sample.cooked()) for sample in mixed_samples()]
    row = pack_batch_sequences(samples, pad_to_multiple_of=8, pad_token_id=encoder.pad_token_id)
    stepper = make_stepper(engine)
    stepper.schedule = lambda step: engine.policy.optim.lr
    for step in range(start, start + count):
        stepper.train(step, [row], num_skipped=0, stop=False)


def weights(engine: Any) -> dict[str, Tensor]:
    """Copies on CPU."""
    return {name: p.detach().to("cpu", copy=True) for name, p in engine.parameters()}


def held(engine: Any) -> dict[str, Tensor]:
    """Weights and whatever a checkpoint has of moments, copied to CPU."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return {
        f"{kind} {box.name}": value.detach().to("cpu", copy=True)
        for kind, box, value in engine.owned_slices()
    }


def update_norm(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """L2 of the difference over all tensors."""
    return float(sum((ours[n] - theirs[n]).double().square().sum() for n in theirs) ** 0.5)


def distance_of(name: OptimizerName, device: torch.device) -> float:
    """How far the weights are from those that torch's AdamW has made of the same, relative to how
    far these have come."""
    found = []
    for one in ("adamw", name):
        engine = new_engine(one, device)
        start = weights(engine)
        take_steps(engine, STEPS)
        found.append(weights(engine))
    return update_norm(found[1], found[0]) / update_norm(found[0], start)


def resumed(
    name: OptimizerName, device: torch.device, folder: Path, *, without_scales: bool = False
) -> list[str]:
    """What of weights and moments has other bits where the last steps were taken from a checkpoint
    of the first.

    Args:
        without_scales: a control: what the reader says of scales is dropped.
    """
    engine = new_engine(name, device)
    take_steps(engine, STEPS // 2)
    save_engine(folder, STEPS // 2, engine, keep=1)
    take_steps(engine, STEPS - STEPS // 2, start=STEPS // 2)
    other = new_engine(name, device)
    if without_scales:
        load = other.load_slices
        other.load_slices = lambda read, **given: load(partial(_unscaled, read), **given)
    load_checkpoint(step_folder(folder, STEPS // 2), other, other.ranks)
    take_steps(other, STEPS - STEPS // 2, start=STEPS // 2)
    ours, theirs = held(other), held(engine)
    assert ours.keys() == theirs.keys()
    return [n for n in theirs if not torch.equal(ours[n], theirs[n])]


def reloaded(name: OptimizerName, device: torch.device, folder: Path) -> list[str]:
    """What has other bits in an engine that has just read what another one saved."""
    engine = new_engine(name, device)
    take_steps(engine, 2)
    save_engine(folder, 2, engine, keep=1)
    other = new_engine(name, device)
    load_checkpoint(step_folder(folder, 2), other, other.ranks)
    ours, theirs = held(other), held(engine)
    assert ours.keys() == theirs.keys() and len(ours) > len(weights(engine))
    return [n for n in theirs if not torch.equal(ours[n], theirs[n])]


def _unscaled(read: Any, kind: str, box: Any) -> Tensor | None:
    return None if kind.endswith("_scale") else read(kind, box)


def state_bytes(name: OptimizerName, device: torch.device, trainable: TrainableSection) -> Any:
    """(bytes of all moments, bytes that `plan` counts on the device and in pages)."""
    engine = new_engine(name, device, trainable)
    take_steps(engine, 1)
    tensors = [value for kind, _, value in engine.owned_slices() if kind != "model"]
    sizes = trained_sizes(engine.policy, Encoder(TINY_MODEL)).moments
    trained = sum(p.numel() for _, p in engine.parameters())
    return sum(value.nbytes for value in tensors), [*sizes.bytes_of(trained)]


def main(folder: Path) -> None:
    """On a CPU."""
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    device = torch.device("cpu")
    others: list[OptimizerName] = ["adamw_8bit", "paged_adamw"]  # a CPU has no pages
    found = {
        "distance": {name: distance_of(name, device) for name in others},
        "resumed": {name: resumed(name, device, folder / name) for name in others},
        "control": resumed("adamw_8bit", device, folder / "control", without_scales=True),
        "bytes": {
            f"{name} {what}": state_bytes(name, device, trainable)
            for name in FACTS
            for what, trainable in (("full", FULL), ("lora", LORA))
        },
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
