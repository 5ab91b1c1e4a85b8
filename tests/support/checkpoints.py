"""Checkpoints of tensors in memory, and checkpoints read with the safetensors library alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.engines import single_rank
from torch import Tensor

from vlmpack.backends.boxes import MOMENTS, Kind, ReadSlice, TensorSlice, whole
from vlmpack.distributed import Ranks
from vlmpack.training.checkpoint import CheckpointContent, Saver, random_state, step_folder


class MemoryEngine:
    """What a checkpoint sees of an engine that holds whole tensors; the moments are made up.

    Args:
        wholes: parameters.
        optimizer_steps: there are moments unless it is 0.
    """

    def __init__(self, wholes: Mapping[str, Tensor], *, optimizer_steps: int = 0) -> None:
        self.optimizer_steps = optimizer_steps
        self.tensors: dict[Kind, dict[str, Tensor]] = {"model": dict(wholes)}
        self.read_as_none: set[tuple[Kind, str]] = set()
        if optimizer_steps:
            for factor, kind in enumerate(MOMENTS, start=2):
                self.tensors[kind] = {name: factor * value for name, value in wholes.items()}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes."""
        return {name: tuple(value.shape) for name, value in self.tensors["model"].items()}

    def owned_slices(self) -> Iterator[tuple[Kind, TensorSlice, Tensor]]:
        """Everything, kind by kind."""
        for kind, tensors in self.tensors.items():
            for name, value in tensors.items():
                yield kind, whole(name, tuple(value.shape)), value

    def load_slices(self, read: ReadSlice, *, optimizer_steps: int) -> None:
        """Everything, one tensor at a time."""
        self.optimizer_steps = optimizer_steps
        for kind in ("model", *MOMENTS):
            for name, shape in self.parameter_shapes().items():
                value = read(kind, whole(name, shape))
                if value is None:
                    self.read_as_none.add((kind, name))
                else:
                    self.tensors.setdefault(kind, {})[name] = value


def content_of(engine: Any, step: int, state: Mapping[str, Any] | None = None) -> CheckpointContent:
    """What the trainer would hand to a saver."""
    return CheckpointContent(
        step=step,
        state=state or {},
        random=random_state(),
        shapes=engine.parameter_shapes(),
        optimizer_steps=engine.optimizer_steps,
    )


def save_engine(
    root: Path,
    step: int,
    engine: Any,
    *,
    keep: int,
    ranks: Ranks | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Save an engine's tensors; the checkpoint's folder."""
    saver = Saver(root, ranks if ranks is not None else single_rank(), keep=keep)
    saver.save(content_of(engine, step, state), engine.owned_slices)
    return step_folder(root, step)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Whole tensors by `kind.name`; every element must be there exactly once."""
    files = {path.name: load_file(str(path)) for path in folder.glob("*-of-*.safetensors")}
    wholes: dict[str, Tensor] = {}
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    used = []
    for kind, named in index.items():
        for name, said in named.items():
            whole = torch.full(said["shape"], float("nan"))
            times = torch.zeros(said["shape"], dtype=torch.int32)
            for box in said["boxes"]:
                at = tuple(slice(a, b) for a, b in zip(box["start"], box["stop"], strict=True))
                whole[at] = files[box["file"]][box["key"]]
                times[at] += 1
                used.append((box["file"], box["key"]))
            assert bool((times == 1).all()), f"{kind}.{name}: an element is missing, or there twice"
            wholes[f"{kind}.{name}"] = whole
    held = [(file, key) for file, tensors in files.items() for key in tensors]
    assert sorted(used) == sorted(held), "index.json lists other boxes than the files hold"
    return wholes
