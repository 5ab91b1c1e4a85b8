"""Run under the device guard: the peak of one rank of 8 that share a long row of an 8B model.

    python -m fake_cuda.long_rows '[{"tokens": 131072, ...}, ...]'      (fields of `Asked`)

FSDP2 shards the model, whose tower is trained. Its collectives move nothing, and no tensor has
numbers. The peak is that of all tensors during the second step. The answer has for each case its
peak, what `vlmpack plan` says, and what it says of the host, in bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from fake_cuda import stand_ins
from fake_cuda.device import CUDA, fake_gpu
from fake_cuda.memory import WORLD, fake_world
from fake_cuda.meta import MODULES, Call, MetaCuda
from gpu_shapes import Shape, shaped_config, write_processor
from support.engines import ADAMW, engine_of, make_stepper
from support.families import tiny_family_folder
from support.published_qwen3_vl import QWEN3_VL_8B
from torch.distributed.fsdp._fully_shard import _fsdp_param

import vlmpack.backends.hf.engine as hf
import vlmpack.backends.hf.sharding as sharding
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.forecast.activations import forms_on
from vlmpack.forecast.figures import LargestMicroBatch
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import built_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.packing import (
    EncodedSample,
    Media,
    PackedBatch,
    pack_batch_sequences,
    pin_batch,
)
from vlmpack.packing.media import tell_tower
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import TrainableSection
from vlmpack.training.objective import SFT

SHAPE = Shape(
    folder="qwen3_vl",
    text=QWEN3_VL_8B["text_config"],
    vision=QWEN3_VL_8B["vision_config"],
    max_tokens=131072,
    sides=(224, 1400),
    words=(10, 900),
    max_pixels=1003520,
)
GRID, IMAGES = (1, 64, 64), 16
"""Patches of an image, four to a token, and how many images a row has: 16,384 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A case: tokens of the row, and settings of `model`."""

    tokens: int
    recompute: str
    tiles: bool = False
    offload: bool = False


def long_row(encoder: Encoder, tokens: int) -> PackedBatch:
    """Two samples, of a quarter and the rest, each with half of the images."""
    each = GRID[1] * GRID[2] // 4
    columns = encoder.image_rule.smallest().pixel_values.shape[1]
    samples = []
    for key, length in (("a", tokens // 4), ("b", tokens - tokens // 4)):
        count = IMAGES // 2
        labels = torch.full((length,), -100)
        labels[count * each : -1] = 5
        samples.append(
            EncodedSample(
                key=key,
                input_ids=torch.full((length,), 7),
                labels=labels,
                position_ids=torch.arange(length).expand(3, -1).contiguous(),
                media_positions=torch.arange(count * each),
                media=Media(
                    pixel_values=torch.zeros(1, 1).expand(4 * count * each, columns),
                    grid_thw=(GRID,) * count,
                    num_tokens=(each,) * count,
                ),
            )
        )
    row = pack_batch_sequences(samples, pad_to_multiple_of=2 * WORLD, pad_token_id=0)
    return tell_tower(row, encoder.family.tower_rule_of(encoder.folder))


class _Work:
    def wait(self, *_: Any) -> bool:
        return True


def _nothing(*_: Any, async_op: bool = False, **__: Any) -> _Work | None:
    return _Work() if async_op else None


@contextmanager
def world_without_numbers(config: Any, listener: Any) -> Iterator[MetaCuda]:
    """A rank of 8 on the fake device; its parameters are read from nowhere."""
    from transformers import AutoModelForImageTextToText

    def build(*_: Any, **__: Any) -> Any:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)

    moves = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")
    with ExitStack() as stack:
        for target, name, value in (
            (hf, "open_model", build),
            (sharding, "_set_aside", lambda _: defaultdict(lambda: None)),
            (sharding, "read_box", lambda *_: None),
            (stand_ins, "MODULES", MODULES),
            (Ranks, "gather_objects", lambda _, mine: [mine]),
            *((dist, name, _nothing) for name in (*moves, "broadcast")),
        ):
            stack.enter_context(patch.object(target, name, value))
        gpu = stack.enter_context(fake_gpu(MetaCuda(listener)))
        for name, share in (("free_storage", 0), ("alloc_storage", 1)):
            resize = _resized(gpu, share)
            stack.enter_context(patch.object(_fsdp_param, name, resize))
        stack.enter_context(fake_world())
        stack.enter_context(stand_ins.installed(tuple(MODULES)))
        yield gpu


def _resized(gpu: MetaCuda, share: int) -> Any:
    return lambda tensor: gpu.resize(tensor, share * tensor.numel() * tensor.itemsize)


def measure(asked: Asked, folder: Path, config: Any) -> dict[str, float]:
    """Its peak and its plan, in bytes."""
    AcceleratorState._reset_state(True)
    encoder = Encoder(folder)
    sizes = built_sizes(encoder.family.auto_class(), folder)
    peak = 0

    def hear(_: Call) -> None:
        nonlocal peak
        peak = max(peak, gpu.bytes)

    model = ModelSection(
        path=str(folder),
        dtype="bfloat16",
        activation_checkpointing=asked.recompute,  # type: ignore[arg-type]
        tiled_mlp=asked.tiles,
        activation_offloading=asked.offload,
    )
    split = ParallelismSection(context=WORLD, sharding="fsdp")
    policy = TrainingPolicy(
        trainable=TrainableSection(vision="full", projector="full", language="full"), optim=ADAMW
    )
    ranks = Ranks(world_size=WORLD, dp_size=1, replica_size=WORLD)
    batch = long_row(encoder, asked.tokens)
    assert batch.media is not None
    with world_without_numbers(config, hear) as gpu:
        engine = engine_of(model, split, encoder, replace(ranks, device=CUDA), policy)
        stepper = make_stepper(engine, objective=SFT)
        for step in range(2):
            peak = 0
            stepper.train(step, [pin_batch(batch)], num_skipped=0, stop=False)
        figures = memory_figures(
            model,
            split,
            sizes,
            LargestMicroBatch(1, batch.num_slots, batch.media.pixel_values.shape[0]),
            global_batch_size=1,
            world_size=WORLD,
            trained=trained_sizes(policy, encoder),
            forms=forms_on(CUDA, model),
        )
    return {"peak": peak, "planned": figures.total, "offloaded": figures.offloaded}


def answers(cases: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """One for each case."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        source = tiny_family_folder(SHAPE.folder, Path(made) / "tiny")
        config = shaped_config(SHAPE, source)
        config.save_pretrained(folder)
        write_processor(SHAPE, config, source, folder)
        return [measure(Asked(**case), folder, config) for case in cases]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(answers(json.loads(sys.argv[1]))))
