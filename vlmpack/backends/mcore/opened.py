"""The weights of a transformers folder, box by box, by the names that transformers itself gives
them on load: for families whose files have so many other names, and tensors in one that are several
there, that `pretrained` does not know them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.backends.hf.deferred import read_box
from vlmpack.backends.hf.load import open_model
from vlmpack.backends.mcore.pretrained import PretrainedReader
from vlmpack.backends.mcore.weights import MegatronFamily
from vlmpack.errors import ModelError


class OpenedReader:
    """As `pretrained.PretrainedReader`; transformers says what was missing or left over.

    Args:
        folder: model folder.

    Raises:
        ModelError: as `open_model`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = open_model(folder)
        self._tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tensors |= dict(model.named_buffers())

    def __enter__(self) -> OpenedReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tensors.clear()

    def check(self, shapes: Mapping[str, tuple[int, ...]], *_: object) -> None:
        """Raise ModelError for a tensor of another shape."""
        for name, shape in shapes.items():
            found = tuple(self._tensors[name].shape)
            if found != shape:
                raise ModelError(f"model.path: {self.folder} has {name} {found} instead of {shape}")

    def __call__(self, kind: Kind, box: TensorSlice) -> Tensor | None:
        """A box of a weight as float32 on CPU; None for a moment."""
        if kind != "model":
            return None
        target = torch.empty(box.lengths, dtype=torch.float32)
        try:
            read_box(self._tensors[box.name], box.index, target)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path: {box.name} cannot be read: {error}") from error
        return target


def folder_reader(
    folder: Path, family: MegatronFamily, skeleton: Any
) -> OpenedReader | PretrainedReader:
    """What reads a model folder's weights into the place of a skeleton's; raises as it does."""
    if family.opened:
        return OpenedReader(folder)
    return PretrainedReader(folder, family, skeleton.all_tied_weights_keys)
