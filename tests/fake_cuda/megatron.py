"""Run under the device guard: an optimizer step of the mcore engine on the fake GPU.

    python -m fake_cuda.megatron '[{"name": "TP 2", "split": {"tensor": 2}}, ...]'

It is rank 0 of 8 in torch's fake process group, whose collectives move nothing: the numbers of a
replica that is one process are its own, those of others mean nothing. Pipeline stages run apart
from the schedule: what a stage receives, its shape included, comes from ranks that are not
there. The answer has for each layout what `Seen` has.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from fake_cuda.device import CUDA, fake_gpu
from fake_cuda.memory import WORLD, fake_world
from support.engines import EVERYTHING, engine_of, make_stepper
from support.shards import TINY_MODEL, mixed_samples

from vlmpack.backends.mcore.engine import MegatronEngine
from vlmpack.backends.mcore.groups import stop_model_parallel
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.packing import pack_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.vlm_step import forward_step


@dataclass(kw_only=True)
class Seen:
    """What came of a layout.

    Args:
        error: the traceback of what was raised; empty where nothing was.
        attention: what ran.
        waits: (what, place) of each time that the host waited for the device.
        loss, grad_norm: on the fake GPU, in bfloat16.
        cpu_loss, cpu_grad_norm: of the same step on CPU, in float32, at DP 8.
        without_gradient: parameters that got none or nothing but zeros.
        elsewhere: parameters and buffers that are not on the device.
    """

    error: str = ""
    attention: str = ""
    waits: list[tuple[str, str]] = field(default_factory=list)
    loss: float = 0.0
    grad_norm: float = 0.0
    cpu_loss: float = 0.0
    cpu_grad_norm: float = 0.0
    without_gradient: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


def _ran(given: dict[str, Any], device: torch.device, seen: Seen) -> tuple[float, float]:
    """Loss and gradient norm of a step; `seen` gets the rest where it is on the GPU."""
    split = ParallelismSection(**given["split"])
    replica = split.tensor * split.context * split.pipeline
    world = WORLD if replica > 1 or split.distributed_optimizer else 1
    ranks = Ranks(world_size=world, dp_size=world // replica, replica_size=replica, device=device)
    on_gpu, encoder = device == CUDA, Encoder(TINY_MODEL)
    model = ModelSection(
        path=str(TINY_MODEL),
        backend="mcore",
        dtype="bfloat16" if on_gpu else "float32",
        attention=given.get("attention", "auto") if on_gpu else "segments",
    )
    samples = [encoder.encode(raw.cooked()) for raw in mixed_samples()]
    batch = pack_batch_sequences(
        samples, pad_to_multiple_of=8, total_multiple_of=8, pad_token_id=encoder.pad_token_id
    )
    alone = patch.multiple(
        Ranks, gather_objects=lambda _, mine: [mine], sum_over_world=lambda _, values: values
    )
    # Tensors of other stages and ranks are nowhere: they are no processes.
    there = patch.object(MegatronEngine, "_check_coverage", lambda *_: None)
    with (
        fake_gpu() if on_gpu else nullcontext() as gpu,
        fake_world() if world > 1 else nullcontext(),
        alone,
        there,
    ):
        engine = engine_of(model, split, encoder, ranks, EVERYTHING)
        if gpu is not None:
            gpu.waits.clear()
        loss, norm = 0.0, 0.0
        if split.pipeline > 1:
            engine.ddp.train()
            out, _ = forward_step(iter([engine.prepare(batch)]), engine.ddp)
            out.float().sum().backward()
        else:
            sums, _ = make_stepper(engine).train(0, [batch], num_skipped=0, stop=False)
            loss, norm = sums.loss or 0.0, sums.grad_norm
        if gpu is not None:
            seen.waits = [(wait.what, wait.place) for wait in gpu.waits]
            seen.attention = engine.description["attention"]
            tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
            seen.elsewhere = [name for name, value in tensors if value.device != CUDA]
            seen.without_gradient = [
                name
                for name, value in engine.model.named_parameters()
                if not value.main_grad.held.any()
            ]
        stop_model_parallel()
    return loss, norm


def look(given: dict[str, Any]) -> Seen:
    """A layout, on the fake GPU, and where it is one process on CPU too."""
    seen = Seen()
    try:
        seen.loss, seen.grad_norm = _ran(given, CUDA, seen)
        if given["split"] == {"distributed_optimizer": True}:  # a replica is one process
            seen.cpu_loss, seen.cpu_grad_norm = _ran(given, torch.device("cpu"), seen)
    except Exception:
        seen.error = traceback.format_exc()
        stop_model_parallel()
    return seen


def main() -> None:
    warnings.simplefilter("ignore")
    print(json.dumps([asdict(look(given)) for given in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
