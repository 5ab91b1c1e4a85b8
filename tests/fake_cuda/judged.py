"""Run under the device guard: `vlmpack.judge` over a model on the fake GPU and batches of the CPU.

    python -m fake_cuda.judged '[{"family": "qwen2_5_vl", ...}, ...]'      (fields of `Judged`)

The answer has for each what `Found` has.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fake_cuda.device import CUDA, fake_gpu
from support.foreign import broken, by_token, packing, padded
from support.judged import Case, losses_of, on_kernel

from vlmpack.proof.judge import judge


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What is judged.

    Args:
        family: whose tiny model.
        packed: whether a row holds all samples.
        fault: planted in the collator.
        batches: the device on which the collator makes its batches.
        stock: the device of another model that computes the samples; none for the same.
        own: whether losses and the step are somebody's.
        half: whether it is in bfloat16, on torch's varlen kernel.
    """

    family: str
    packed: bool = True
    fault: str = ""
    batches: str = "cpu"
    stock: str = ""
    own: bool = False
    half: bool = False


@dataclass(kw_only=True)
class Found:
    """What came of it."""

    faults: list[str] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)
    said: str = ""
    error: str = ""


@contextmanager
def numbers_read_one_by_one() -> Iterator[None]:
    """torch.tensor of a list of the device's numbers, as `get_rope_index` makes one: torch reads
    them below what the fake device sees."""
    make = torch.tensor

    def made(data: Any, *args: Any, **options: Any) -> torch.Tensor:
        if isinstance(data, list):
            data = [each.item() if isinstance(each, torch.Tensor) else each for each in data]
        return make(data, *args, **options)

    with patch.object(torch, "tensor", made):
        yield


def look(given: Judged, folder: Path) -> Found:
    """One of them."""
    case = Case(given.family, folder)
    # Loaded before there is a device: what transformers imports meanwhile keeps what stands for it.
    model, other = case.model(packed=given.packed), case.model(packed=False)
    right = packing(case.model()) if given.packed else padded
    with fake_gpu(), numbers_read_one_by_one():
        model = on_kernel(case, model, "torch_varlen", CUDA) if given.half else model.to(CUDA)
        assert next(model.parameters()).device == CUDA
        collate = broken(right, given.fault) if given.fault else right

        def made(samples: Any) -> Any:
            batch = collate(samples)
            return {
                name: value.to(given.batches) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            }

        options: dict[str, Any] = {"losses": losses_of, "step": by_token} if given.own else {}
        if given.stock:
            options["stock"] = other.to(given.stock)
        found = judge(model, made, case.samples, **options)
    return Found(
        faults=list(found.faults),
        statuses={one.check.name: one.check.status for one in found.findings},
        said=str(found),
    )


def main() -> None:
    warnings.simplefilter("ignore")
    answers = []
    for number, fields in enumerate(json.loads(sys.argv[1])):
        with tempfile.TemporaryDirectory() as made:
            try:
                answers.append(look(Judged(**fields), Path(made) / str(number)))
            except Exception:
                answers.append(Found(error=traceback.format_exc()))
    print(json.dumps([asdict(each) for each in answers]))


if __name__ == "__main__":
    main()
