"""Run under the device guard: what a step learns, with inputs of layers on the host and without.

    python -m fake_cuda.offloaded [[fault, ...]]

The answer has for each fault ("" for none) whether the weights after two steps are those of a run
that keeps its activations, bit for bit, and the copies to the host.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from fake_cuda.device import CUDA, fake_gpu
from support.engines import ADAMW, engine_of, make_stepper, single_rank
from support.families import tiny_family_folder
from support.shards import mixed_samples
from torch import Tensor

from vlmpack.backends import offload
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator, pin_batch
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import TrainableSection
from vlmpack.training.objective import SFT

FAULTS: dict[str, Any] = {
    "": nullcontext,
    "other numbers": lambda: patch.object(
        offload._Stored, "fetch", lambda self, stream: setattr(self, "device", _of_ones(self))
    ),
}


def _of_ones(stored: Any) -> Tensor:
    stored.copied = torch.cuda.current_stream().record_event()
    return torch.ones_like(stored.host, device=stored.place)


def trained(folder: Path, *, offloading: bool) -> tuple[list[Tensor], int]:
    """Weights after two steps of two micro-batches, and copies to pinned memory."""
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    encoder = Encoder(folder)
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    samples = [encoder.encode(one.cooked()) for one in mixed_samples()]
    rows = [collate(samples[:3]), collate(samples[3:])]
    parts = {"vision": "full", "projector": "full", "language": "full"}
    policy = TrainingPolicy(trainable=TrainableSection(**parts), optim=ADAMW)
    model = ModelSection(
        path=str(folder),
        dtype="bfloat16",
        attention="segments",
        activation_checkpointing="full",
        activation_offloading=offloading,
    )
    with fake_gpu() as gpu:
        ranks = replace(single_rank(), device=CUDA)
        engine = engine_of(model, ParallelismSection(), encoder, ranks, policy)
        stepper = make_stepper(engine, objective=SFT)
        begun = gpu.arrivals.begun
        for step in range(2):
            stepper.train(step, [pin_batch(row) for row in rows], num_skipped=0, stop=False)
        weights = [parameter.held.clone() for _, parameter in engine.parameters()]  # type: ignore[attr-defined]
        return weights, gpu.arrivals.begun - begun


def main() -> None:
    warnings.simplefilter("ignore")
    answers = {}
    with tempfile.TemporaryDirectory() as made:
        folder = tiny_family_folder("qwen2_5_vl", Path(made) / "model")
        expected, copies = trained(folder, offloading=False)
        for fault in json.loads(sys.argv[1]):
            with FAULTS[fault]():
                weights, more = trained(folder, offloading=True)
            same = all(map(torch.equal, weights, expected))
            answers[fault] = {"same": same, "copies": more - copies}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
