"""Run under the device guard: an optimizer step of the mcore engine on the fake GPU.

    python -m fake_cuda.megatron '[{"name": "TP 2", "split": {"tensor": 2}}, ...]'

It is one rank of 8 in torch's fake process group, whose collectives move nothing: the numbers of a
replica that is one process are its own, those of others mean nothing. What a pipeline stage gets
from its neighbours is drawn (`Neighbours`). The answer has for each layout what `Seen` has.
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
import torch.distributed as dist
from fake_cuda.device import CUDA, fake_gpu
from fake_cuda.memory import WORLD, fake_world
from support.engines import EVERYTHING, engine_of, make_stepper
from support.shards import TINY_MODEL, mixed_samples
from torch import Tensor

from vlmpack.backends.mcore import engine as engines
from vlmpack.backends.mcore.engine import MegatronEngine
from vlmpack.backends.mcore.groups import stop_model_parallel
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.packing import pack_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection


@dataclass(kw_only=True)
class Seen:
    """What came of a layout.

    Args:
        error: the traceback of what was raised; empty where nothing was.
        attention, fused: what ran.
        waits: (what, place) of each time that the host waited for the device.
        loss, grad_norm: on the fake GPU, in bfloat16.
        cpu_loss, cpu_grad_norm: of the same step on CPU, in float32, at DP 8.
        without_gradient: parameters that got none or nothing but zeros.
        elsewhere: parameters and buffers that are not on the device.
        traffic: (isend or irecv, rank, shape, dtype) between pipeline stages, in order.
        hidden: shape of what each micro-batch hands from stage to stage.
    """

    error: str = ""
    attention: str = ""
    fused: str = ""
    waits: list[tuple[str, str]] = field(default_factory=list)
    loss: float = 0.0
    grad_norm: float = 0.0
    cpu_loss: float = 0.0
    cpu_grad_norm: float = 0.0
    without_gradient: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    traffic: list[tuple[str, int, list[int], str]] = field(default_factory=list)
    hidden: list[list[int]] = field(default_factory=list)


class Neighbours:
    """The stages beside this one: what it sends is looked at, what it waits for is drawn.

    Args:
        hidden: shape of what each micro-batch hands on, forward and backward.
    """

    def __init__(self, hidden: list[list[int]]) -> None:
        self.hidden, self.traffic = hidden, []
        self.draw, self.told = torch.Generator().manual_seed(0), {}

    def __call__(self, operations: list[dist.P2POp]) -> list[Any]:
        """In the place of `batch_isend_irecv`."""
        for each in operations:
            tensor, name = each.tensor, each.op.__name__
            if tensor.device != CUDA or not tensor.is_contiguous():
                raise RuntimeError(f"{name} of {tuple(tensor.shape)} on {tensor.device}")
            self.traffic.append((name, each.peer, [*tensor.shape], str(tensor.dtype)))
            if name == "irecv":
                tensor.held.copy_(self._from(each.peer, tensor))
        return []

    def _from(self, peer: int, tensor: Tensor) -> Tensor:
        """The next micro-batch's shape, or numbers."""
        if tensor.dtype is torch.int64:
            number = self.told[peer] = self.told.get(peer, -1) + 1
            return torch.tensor(self.hidden[number])
        return 0.1 * torch.randn(tensor.shape, generator=self.draw)


def _ran(given: dict[str, Any], device: torch.device, seen: Seen) -> tuple[float, float]:
    """Loss and gradient norm of a step; `seen` gets the rest where it is on the GPU."""
    split = ParallelismSection(**given["split"])
    replica = split.tensor * split.context * split.pipeline
    world = WORLD if replica > 1 or split.distributed_optimizer else 1
    stage = given.get("stage", 0)
    ranks = Ranks(
        rank=stage * world // split.pipeline,
        world_size=world,
        dp_size=world // replica,
        replica_rank=stage * replica // split.pipeline,
        replica_size=replica,
        device=device,
    )
    on_gpu, encoder = device == CUDA, Encoder(TINY_MODEL)
    model = ModelSection(
        path=str(TINY_MODEL),
        backend="mcore",
        dtype="bfloat16" if on_gpu else "float32",
        attention=given.get("attention", "auto") if on_gpu else "segments",
    )
    samples = [encoder.encode(raw.cooked()) for raw in mixed_samples()]
    rows = [samples[0::2], samples[1::2], samples[1:3]] if split.pipeline > 1 else [samples]
    batches = [
        pack_batch_sequences(
            row, pad_to_multiple_of=8, total_multiple_of=8, pad_token_id=encoder.pad_token_id
        )
        for row in rows
    ]
    alone = patch.multiple(
        Ranks, gather_objects=lambda _, mine: [mine], sum_over_world=lambda _, values: values
    )
    # Tensors of other stages and ranks are nowhere: they are no processes.
    there = patch.object(MegatronEngine, "_check_coverage", lambda *_: None)
    with (
        fake_gpu() if on_gpu else nullcontext() as gpu,
        fake_world(ranks.rank) if world > 1 else nullcontext(),
        alone,
        there,
        # As Megatron does without us: the sender says each width.
        patch.object(engines, "stage_exchange", lambda *_: {})
        if given.get("told")
        else nullcontext(),
    ):
        engine = engine_of(model, split, encoder, ranks, EVERYTHING)
        if gpu is not None:
            gpu.waits.clear()
        width = engine.model.config.hidden_size
        shares = split.context * (split.tensor if split.sequence else 1)
        slots = [batch.num_slots // shares for batch in batches]
        beside = Neighbours([[each, 1, width] for each in slots])
        with patch.object(dist, "batch_isend_irecv", beside):
            sums, _ = make_stepper(engine).train(0, batches, num_skipped=0, stop=False)
        loss, norm = sums.loss or 0.0, sums.grad_norm
        seen.traffic, seen.hidden = beside.traffic, beside.hidden
        if gpu is not None:
            seen.waits = [(wait.what, wait.place) for wait in gpu.waits]
            seen.attention = engine.description["attention"]
            seen.fused = engine.description["fused layers"]
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
