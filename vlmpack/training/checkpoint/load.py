"""Loading: any layout reads the boxes that it needs from those that any layout wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.backends.engine import Engine
from vlmpack.distributed import Ranks
from vlmpack.errors import UNREADABLE, CheckpointError
from vlmpack.file_format import CHECKPOINT
from vlmpack.model_folder.safetensors_read import DTYPES, StoredTensor, read_into, tensors_of
from vlmpack.training.checkpoint.folders import (
    INDEX,
    RANDOM,
    STATE,
)
from vlmpack.training.checkpoint.index import StoredBox, TensorIndex
from vlmpack.training.checkpoint.safetensors_file import read_tensors
from vlmpack.whole_file import read_json


class CheckpointReader:
    """A checkpoint that `find_damage` has verified, read one box at a time.

    Raises:
        CheckpointError: it is of another format, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, dict[str, StoredTensor]] = {}
        with _readable(folder):
            state = read_json(folder / STATE)
            CHECKPOINT.take(state, folder, CheckpointError)
            self.state: Mapping[str, Any] = state
            self.optimizer_steps = int(self.state["optimizer_steps"])
            self._index = TensorIndex.from_json(read_json(folder / INDEX))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See that it holds exactly these parameters, and their moments after the first step.

        Raises:
            CheckpointError: other names or shapes, or elements that are missing or there twice.
        """
        problem = self._index.find_mismatch(shapes, optimizer_steps=self.optimizer_steps)
        if problem is not None:
            raise CheckpointError(f"{self.folder} does not fit the model: {problem}")

    def random(self) -> dict[str, Tensor]:
        """Generator states.

        Raises:
            CheckpointError: they cannot be read.
        """
        with _readable(self.folder):
            return read_tensors(self.folder / RANDOM)

    def read(self, kind: Kind, box: TensorSlice) -> Tensor | None:
        """A box on CPU, put together from the boxes that hold it.

        Returns:
            `box.lengths`, in the dtype that was saved; None where there is no such tensor.

        Raises:
            CheckpointError: the tensor has another shape, or the files lack a part of the box.
        """
        stored = self._index.tensors[kind].get(box.name)
        if stored is None:
            return None
        if stored[0].box.shape != box.shape:
            raise CheckpointError(
                f"{box.name}: shape {stored[0].box.shape} in {self.folder}, expected {box.shape}"
            )
        with _readable(self.folder):
            result = torch.empty(box.lengths, dtype=DTYPES[stored[0].dtype])
            filled = sum(self._copy(part, box, result) for part in stored)
        if filled != result.numel():
            raise CheckpointError(
                f"{kind} {box.name} from {box.start} to {box.stop}: {self.folder} holds {filled} "
                f"elements, expected {result.numel()}"
            )
        return result

    def _copy(self, stored: StoredBox, box: TensorSlice, result: Tensor) -> int:
        """Copy the part of `box` that a stored box holds; returns the number of elements."""
        part = box.intersection(stored.box)
        if part is None:
            return 0
        if stored.file not in self._files:
            held = tensors_of(self.folder / Path(stored.file).name)
            self._files[stored.file] = {tensor.name: tensor for tensor in held}
        tensor = self._files[stored.file][stored.key]
        if (tensor.dtype, tensor.shape) != (stored.dtype, stored.box.lengths):
            raise ValueError(f"{stored.file} holds {tensor}, {INDEX} says {stored}")
        target = result[_relative(part, box)]
        read_into(target, tensor, _relative(part, stored.box))
        return target.numel()


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn errors of damaged files into CheckpointError."""
    try:
        yield
    except UNREADABLE as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def load_checkpoint(
    folder: Path, engine: Engine, ranks: Ranks
) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Load parameters and moments into an engine. Collective.

    Returns:
        What state.json holds, and the generator states.

    Raises:
        CheckpointError: on every rank, if it does not fit the model or any rank cannot read it.
    """
    with ranks.raised_by_all(CheckpointError):
        reader = CheckpointReader(folder)
        reader.check(engine.parameter_shapes())
    with ranks.raised_by_all(CheckpointError):
        engine.load_slices(reader.read, optimizer_steps=reader.optimizer_steps)
        random = reader.random()
    return reader.state, random


def _relative(part: TensorSlice, base: TensorSlice) -> tuple[slice, ...]:
    """Indices that select `part` in a tensor that holds `base`."""
    return tuple(
        slice(a - origin, b - origin)
        for a, b, origin in zip(part.start, part.stop, base.start, strict=True)
    )
