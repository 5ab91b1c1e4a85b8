"""Run under the device guard: checkpoints of tensors on the fake GPU, saved in both ways.

    python -m fake_cuda.copies '["", "no wait", ...]'      (names of `PLANTS`, or none)

The answer has for each what `Saved` has.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from fake_cuda.device import FakeCuda, fake_gpu
from support.checkpoints import MemoryEngine, content_of, stored_tensors
from support.engines import single_rank
from torch import Tensor

from vlmpack.training.checkpoint import Saver, safetensors_file, step_folder
from vlmpack.training.checkpoint.safetensors_file import HostCopies

PIECE_BYTES = 64


@dataclass(kw_only=True)
class Saved:
    """What came of it.

    Args:
        wrong: by way of saving, the tensors that are not what they were.
        waits: where the host waited for the device, and for what.
        pieces: that had to come from the device.
        pinned: bytes of the host that were locked.
    """

    wrong: dict[str, list[str]]
    waits: list[tuple[str, str]]
    pieces: int
    pinned: int


def values() -> dict[str, Tensor]:
    """Of several sizes and layouts, none of the first piece's bytes twice."""
    draw = torch.Generator().manual_seed(0)
    return {
        "small": torch.randn(3, generator=draw),
        "one": torch.randn((), generator=draw),
        "empty": torch.randn(0, 4, generator=draw),
        "exactly": torch.randn(4, 8, generator=draw),
        "more": torch.randn(17, 5, generator=draw),
        "turned": torch.randn(9, 6, generator=draw).T,
        "half": torch.randn(50, generator=draw).bfloat16(),
    }


def _begun_as(change: Callable[..., Any]) -> AbstractContextManager[Any]:
    start = HostCopies._start_copy
    return patch.object(HostCopies, "_start_copy", lambda *args: change(start, *args))


def _not_awaited(start: Any, *args: Any) -> Any:
    return start(*args)[0], SimpleNamespace(synchronize=lambda: None)


def _into_one_buffer(start: Any, self: Any, part: Any, number: int, stream: Any) -> Any:
    return start(self, part, 0, stream)


def _pageable() -> AbstractContextManager[Any]:
    changed = SimpleNamespace(**{name: getattr(torch, name) for name in ("cuda", "uint8")})
    changed.empty = lambda *size, dtype, pin_memory=False: torch.empty(*size, dtype=dtype)
    return patch.object(safetensors_file, "torch", changed)


PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "no wait": lambda: _begun_as(_not_awaited),
    "one buffer": lambda: _begun_as(_into_one_buffer),
    "pageable": _pageable,
}


def _saved(gpu: FakeCuda, root: Path) -> dict[str, Path]:
    """A checkpoint by each way; what is saved in the background is changed before it is written."""
    engine = MemoryEngine({name: value.to("cuda") for name, value in values().items()})
    gpu.waits.clear()
    saver = Saver(root / "at once", single_rank(), keep=1)
    saver.save(content_of(engine, 1), engine.owned_slices)
    later = Saver(root / "later", single_rank(), keep=1)
    later.save_in_background(content_of(engine, 1), engine.owned_slices)
    later.wait_for_copy()
    for _, _, value in engine.owned_slices():
        value.add_(1)
    later.finish()
    return {way: step_folder(root / way, 1) for way in ("at once", "later")}


def run(plant: str, root: Path) -> Saved:
    """Save, and read it back with the safetensors library."""
    with ExitStack() as stack:
        stack.enter_context(PLANTS[plant]())
        stack.enter_context(patch.object(HostCopies.__init__, "__kwdefaults__", _SMALL))
        gpu = stack.enter_context(fake_gpu())
        folders = _saved(gpu, root)
    expected = values()
    wrong = {}
    for way, folder in folders.items():
        found = stored_tensors(folder)
        assert found.keys() == {f"model.{name}" for name in expected}
        wrong[way] = [n for n, v in expected.items() if not torch.equal(found[f"model.{n}"], v)]
    sizes = [value.numel() * value.element_size() for value in expected.values()]
    return Saved(
        wrong=wrong,
        waits=[(wait.what, wait.place) for wait in gpu.waits],
        pieces=2 * sum(-(-size // PIECE_BYTES) for size in sizes),
        pinned=sum(tensor.numel() for tensor in gpu.arrivals.locked.values()),
    )


_SMALL = {"piece_bytes": PIECE_BYTES}


def main() -> None:
    answers = []
    for plant in json.loads(sys.argv[1]):
        with tempfile.TemporaryDirectory() as root:
            answers.append(asdict(run(plant, Path(root))))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
