"""Run under torchrun: what one rank keeps for the backward pass of one long row.

    torchrun --nproc-per-node CP context_memory.py FOLDER TOKENS [--recompute full] [--backend hf]
        [--images]

Prints, on rank 0, JSON: bytes of distinct tensors saved by autograd during the forward pass
(weights left out), on the rank that keeps most.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vlmpack.backends.hf.engine import HFEngine
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.build.engine import resolved_compute
from vlmpack.distributed import (
    start_process_group,
    stop_process_group,
    world_size_from_environment,
)
from vlmpack.encode import Encoder
from vlmpack.packing import (
    IGNORE_INDEX,
    EncodedSample,
    Media,
    PackedBatch,
    pack_batch_sequences,
)
from vlmpack.packing.media import tell_tower
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import OptimSection, TrainableSection

GRID = (1, 32, 32)
"""Patches of an image: frames, height, width. Four of them make one token."""


def long_row(tokens: int, multiple: int, encoder: Encoder, *, images: bool) -> PackedBatch:
    """Two documents, the last token of each labelled. Half of each is images, if asked for."""
    samples = []
    for number, length in enumerate((tokens // 4, tokens - tokens // 4)):
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 500, (length,), generator=draw)
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[-2] = ids[-1]
        each = GRID[0] * GRID[1] * GRID[2] // 4
        count = length // 2 // each if images else 0
        samples.append(
            EncodedSample(
                key=str(number),
                input_ids=ids,
                labels=labels,
                position_ids=torch.arange(length).expand(3, -1),
                media_positions=torch.arange(count * each),
                media=_images(encoder, count, each, draw) if count else None,
            )
        )
    row = pack_batch_sequences(samples, pad_to_multiple_of=multiple, pad_token_id=0)
    return tell_tower(row, encoder.family.tower_rule_of(encoder.folder))


def _images(encoder: Encoder, count: int, each: int, draw: torch.Generator) -> Media:
    columns = encoder.image_rule.smallest().pixel_values.shape[1]
    return Media(
        pixel_values=torch.randn(4 * count * each, columns, generator=draw),
        grid_thw=(GRID,) * count,
        num_tokens=(each,) * count,
    )


def built(model: ModelSection, *given: Any) -> tuple[Any, Any, Any]:
    """An engine: the module that takes rows, what cuts them, and the block it runs in."""
    if model.backend == "hf":
        engine = HFEngine(model, *given)
        cut = engine.context.part_of if engine.context is not None else lambda row: row
        return engine.vlm, cut, nullcontext()
    from vlmpack.backends.mcore.engine import MegatronEngine
    from vlmpack.backends.mcore.groups import megatron_on_cpu

    engine = MegatronEngine(model, *given)
    return engine.model, engine.prepare, megatron_on_cpu()


def main(asked: Namespace) -> None:
    """Forward once, count, print."""
    world = world_size_from_environment()
    ranks = start_process_group(context=world)
    model = ModelSection(
        path=str(asked.folder),
        backend=asked.backend,
        dtype="float32",
        activation_checkpointing=asked.recompute,
    )
    split = ParallelismSection(context=world)
    policy = TrainingPolicy(trainable=TrainableSection(), optim=OptimSection(lr=1.0))
    encoder = Encoder(asked.folder)
    compute = resolved_compute(model, split, encoder, ranks.device)
    module, cut, running = built(model, split, encoder, ranks, policy, compute)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    multiple = 2 * world if world > 1 else 1
    row = cut(long_row(asked.tokens, multiple, encoder, images=asked.images))
    module.train()
    with running, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        losses = module(row, row.packed_seq_params())
    most = torch.tensor([float(sum(saved.values()))])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    loss = losses.sum().detach()[None]
    dist.all_reduce(loss)
    if ranks.is_main:
        print(json.dumps({"saved_mib": most.item() / 2**20, "loss": loss.item()}))
    stop_process_group()


if __name__ == "__main__":
    options = ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("tokens", type=int)
    options.add_argument("--recompute", default="none")
    options.add_argument("--backend", default="mcore")
    options.add_argument("--images", action="store_true")
    main(options.parse_args())
