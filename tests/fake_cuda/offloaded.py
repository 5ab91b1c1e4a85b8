"""Run under the device guard: what a step learns, with inputs of layers on the host and without.

    python -m fake_cuda.offloaded {family: [fault, ...]}

The answer has for each family and fault ("" for none) whether the weights after two steps are those
of a run that keeps its activations, bit for bit. It has the copies to the host and back, and the
inputs that were asked for before anything began to copy them back.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """What is copied, and what is late."""
    copy, restore = offload._Stored.copy, offload.Offload._restore

    def copied(stored: Any, target: Tensor, source: Tensor, stream: Any) -> None:
        counts["back" if target.is_cuda else "out"] += 1
        copy(stored, target, source, stream)

    def restored(layers: Any, stored: Any) -> Tensor:
        counts["late"] += not isinstance(stored, Tensor) and stored.device is None
        return restore(layers, stored)

    with (
        patch.object(offload._Stored, "copy", copied),
        patch.object(offload.Offload, "_restore", restored),
    ):
        yield


def trained(folder: Path, *, offloading: bool) -> list[Tensor]:
    """Weights after two steps of two micro-batches."""
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
    with fake_gpu():
        ranks = replace(single_rank(), device=CUDA)
        engine = engine_of(model, ParallelismSection(), encoder, ranks, policy)
        stepper = make_stepper(engine, objective=SFT)
        for step in range(2):
            stepper.train(step, [pin_batch(row) for row in rows], num_skipped=0, stop=False)
        return [parameter.held.clone() for _, parameter in engine.parameters()]  # type: ignore[attr-defined]


def main() -> None:
    warnings.simplefilter("ignore")
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        for family, faults in json.loads(sys.argv[1]).items():
            folder = tiny_family_folder(family, Path(made) / family)
            expected, answers[family] = trained(folder, offloading=False), {}
            for fault in faults:
                counts = Counter[str]()
                with FAULTS[fault](), counted(counts):
                    weights = trained(folder, offloading=True)
                same = all(map(torch.equal, weights, expected))
                answers[family][fault] = {"same": same, **counts}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
