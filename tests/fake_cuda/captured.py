"""Run under the device guard: the captured decoder of families on the fake GPU, on a tape.

    python -m fake_cuda.captured '[{"family": "qwen3_vl"}, ...]'

Attention is the kernel for CUDA, in bfloat16 under autocast; a tape stands in for the CUDA graph.
The answer has for each case what `Seen` has.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from fake_cuda.device import CUDA, fake_gpu
from support.captured import StreamRecording, first_difference, host_reads, rows_of
from support.engines import EVERYTHING, single_rank
from support.families import tiny_family_folder

from vlmpack.backends.hf.engine import HFEngine
from vlmpack.backends.recording import TapeRecording
from vlmpack.build.compute import settled_compute
from vlmpack.encode import Encoder
from vlmpack.packing import pin_batch
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.objective import SFT


@dataclass(kw_only=True)
class Seen:
    """What came of a case.

    Args:
        error: the traceback of what was raised; empty where nothing was.
        attention: what ran.
        operators: of each row, forward and backward.
        difference: where a row's operators differ from the first row's; None where nowhere.
        reads: operators that no graph can hold.
        unlike: parameters whose gradient on the tape is not that of the same code run eagerly.
        gradients: how many were compared.
        captures, replays: of the tape.
    """

    error: str = ""
    attention: str = ""
    operators: list[int] = field(default_factory=list)
    difference: str | None = None
    reads: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    gradients: int = 0
    captures: int = 0
    replays: int = 0


def _engine(folder: Path, encoder: Encoder, recorder: Any) -> HFEngine:
    model = ModelSection(path=str(folder), dtype="bfloat16")
    split, ranks = ParallelismSection(), replace(single_rank(), device=CUDA)
    compute = settled_compute(model, split, encoder, CUDA, captures=True)
    with patch("vlmpack.backends.hf.engine.recorder", lambda _: recorder):
        return HFEngine(model, split, encoder, ranks, EVERYTHING, compute)


def _look(folder: Path, seen: Seen) -> None:
    encoder = Encoder(folder)
    found = []
    with fake_gpu():
        rows = [pin_batch(row) for row in rows_of(encoder).fixed]
        for recorder in (TapeRecording, StreamRecording):
            engine = _engine(folder, encoder, recorder)
            engine.zero_gradients()
            engine.forward_backward(SFT.forward_step, iter(rows), num_microbatches=len(rows))
            given = [(name, each.grad) for name, each in engine.parameters()]
            found.append({name: grad.held.clone() for name, grad in given if grad is not None})
            assert engine.graph is not None
            if recorder is TapeRecording:
                seen.captures, seen.replays = engine.graph.captures, engine.graph.replays
                seen.attention = engine.description["attention"]
            else:
                streams: Any = engine.graph.recording
                seen.operators = [len(stream) for stream in streams.streams]
                seen.difference = first_difference(streams.streams)
                seen.reads = host_reads(streams.streams)
            AcceleratorState._reset_state(True)
    assert found[0].keys() == found[1].keys()
    seen.gradients = sum(bool(value.any()) for value in found[1].values())
    seen.unlike = [name for name, ours in found[0].items() if not torch.equal(ours, found[1][name])]


def look(family: str) -> Seen:
    """A family, on the fake GPU."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as made:
        try:
            _look(tiny_family_folder(family, Path(made)), seen)
        except Exception:
            seen.error = traceback.format_exc()
        AcceleratorState._reset_state(True)
    return seen


def main() -> None:
    warnings.simplefilter("ignore")
    print(json.dumps([asdict(look(**case)) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
