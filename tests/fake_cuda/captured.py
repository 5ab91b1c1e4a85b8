"""Run under the device guard: the captured decoder of families on the fake GPU, on a tape.

    python -m fake_cuda.captured '[{"family": "qwen3_vl"}, ...]'

Attention is the kernel for CUDA, in bfloat16; a tape stands in for the CUDA graph. On Megatron this
is rank 0 of 8 in torch's fake process group, whose collectives move nothing.
The answer has for each case what `Seen` has.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from fake_cuda.device import CUDA, active, fake_gpu
from fake_cuda.memory import WORLD, fake_world
from support.captured import StreamRecording, first_difference, host_reads, rows_of
from support.engines import EVERYTHING, policy, single_rank
from support.families import tiny_family_folder
from torch import Tensor

from vlmpack.backends.decoder_graph import TapeRecording
from vlmpack.backends.hf.engine import HFEngine
from vlmpack.backends.mcore.engine import MegatronEngine
from vlmpack.backends.mcore.groups import stop_model_parallel
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.build.engine import resolved_compute
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.packing import pin_batch
from vlmpack.recipe.schema import ModelSection, ParallelismSection, Recomputed
from vlmpack.recipe.trainable import Mode
from vlmpack.training.objective import SFT

OF_THE_HOST = re.compile(r"(?<!cuda )\b(float|bfloat|int|uint|bool)\d*\[\d")
"""In what an operator was given."""


@dataclass(kw_only=True)
class Seen:
    """What came of a case.

    Args:
        error: the traceback of what was raised; empty where nothing was.
        attention: what ran.
        operators: of each row, forward and backward.
        difference: where a row's operators differ from the first row's; None where nowhere.
        reads: operators that no graph can hold, and waits of the host.
        from_host: operators that take a tensor of the host, more than a number.
        unlike: parameters whose gradient on the tape is not that of the same code run eagerly.
        gradients: how many were compared.
        captures, replays: of the tape.
        collectives: of a row.
    """

    error: str = ""
    attention: str = ""
    operators: list[int] = field(default_factory=list)
    difference: str | None = None
    reads: list[str] = field(default_factory=list)
    from_host: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    gradients: int = 0
    captures: int = 0
    replays: int = 0
    collectives: int = 0


class _Watched(StreamRecording):
    """Notes when the host waits for the device in the captured part: copies, reads."""

    def __init__(self, stretch: Any, wrt: Any) -> None:
        super().__init__(stretch, wrt)
        self.waits: list[str] = []

    def forward(self) -> Tensor:
        with self._watching():
            return super().forward()

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        with self._watching():
            return super().backward(gradient)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        gpu = active()
        before = len(gpu.waits)
        yield
        self.waits += [f"{wait.what}: {wait.place}" for wait in gpu.waits[before:]]


def _on_hf(
    folder: Path, encoder: Encoder, recorder: Any, trained: TrainingPolicy
) -> tuple[Any, Any, Any]:
    # Layers of a model with adapters are computed again, as a recipe for one small GPU has it.
    again: Recomputed = "none" if trained is EVERYTHING else "full"
    model = ModelSection(path=str(folder), dtype="bfloat16", activation_checkpointing=again)
    split, ranks = ParallelismSection(), replace(single_rank(), device=CUDA)
    compute = resolved_compute(model, split, encoder, CUDA, captures=True)
    with patch("vlmpack.backends.hf.engine.recorder", lambda _: recorder):
        engine = HFEngine(model, split, encoder, ranks, trained, compute)
    return engine, engine.graph, lambda: {name: each.grad for name, each in engine.parameters()}


def _on_mcore(
    folder: Path, encoder: Encoder, recorder: Any, given: dict[str, Any]
) -> tuple[Any, Any, Any]:
    model = ModelSection(path=str(folder), dtype="bfloat16", backend="mcore")
    split = ParallelismSection(**given)
    ranks = Ranks(
        world_size=WORLD, dp_size=WORLD // split.tensor, replica_size=split.tensor, device=CUDA
    )
    compute = resolved_compute(model, split, encoder, CUDA, captures=True)
    with patch("vlmpack.backends.mcore.engine.recorder", lambda _: recorder):
        engine = MegatronEngine(model, split, encoder, ranks, EVERYTHING, compute)
    named = dict(engine.model.named_parameters())
    return engine, engine.model.graph, lambda: {n: p.main_grad for n, p in named.items()}


@contextmanager
def _rank_of_a_world() -> Iterator[None]:
    """Rank 0 of processes that are not there: nor are tensors of other ranks."""
    with (
        fake_world(),
        patch.object(Ranks, "gather_objects", lambda _, mine: [mine]),
        patch.object(MegatronEngine, "_check_coverage", lambda *_: None),
    ):
        try:
            yield
        finally:
            stop_model_parallel()


def _look(folder: Path, given: Any, seen: Seen) -> None:
    encoder, found = Encoder(folder), []
    on_mcore = isinstance(given, dict)
    made, world = (_on_mcore, _rank_of_a_world()) if on_mcore else (_on_hf, nullcontext())
    with fake_gpu(), world:
        rows = [pin_batch(row) for row in rows_of(encoder).fixed]
        for recorder in (TapeRecording, _Watched):
            engine, graph, gradients = made(folder, encoder, recorder, given)
            engine.zero_gradients()
            engine.forward_backward(SFT.step_with(), iter(rows), num_microbatches=len(rows))
            taken = gradients().items()
            found.append({name: grad.held.clone() for name, grad in taken if grad is not None})
            if recorder is TapeRecording:
                seen.captures, seen.replays = graph.captures, graph.replays
                seen.attention = engine.description["attention"]
            else:
                streams: Any = graph.recording
                seen.operators = [len(stream) for stream in streams.streams]
                seen.difference = first_difference(streams.streams)
                seen.reads = [*host_reads(streams.streams), *streams.waits]
                seen.from_host = [each for each in streams.streams[0] if OF_THE_HOST.search(each)]
                seen.collectives = sum(each.startswith("c10d.") for each in streams.streams[0])
            AcceleratorState._reset_state(True)
    assert found[0].keys() == found[1].keys()
    seen.gradients = sum(bool(value.any()) for value in found[1].values())
    seen.unlike = [name for name, ours in found[0].items() if not torch.equal(ours, found[1][name])]


def look(family: str, split: dict[str, Any] | None = None, language: Mode = "full") -> Seen:
    """A family, on the fake GPU: on the hf engine, or where there is a split on Megatron's.

    Args:
        language: "lora" for adapters of the decoder on the hf engine, beside a frozen tower.
    """
    trained = EVERYTHING if language == "full" else policy("frozen", "frozen", language)
    seen = Seen()
    with tempfile.TemporaryDirectory() as made:
        try:
            _look(tiny_family_folder(family, Path(made)), split or trained, seen)
        except Exception:
            seen.error = traceback.format_exc()
        AcceleratorState._reset_state(True)
    return seen


def main() -> None:
    warnings.simplefilter("ignore")
    print(json.dumps([asdict(look(**case)) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
