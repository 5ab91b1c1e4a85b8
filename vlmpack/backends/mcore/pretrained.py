"""The weights of a transformers folder, box by box: no rank reads more than its own share."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.backends.mcore.weights import MegatronFamily
from vlmpack.errors import ModelError
from vlmpack.model_folder.weights import raise_misfits, weight_files

_NO_NAME = re.compile("(?!)")


class PretrainedReader:
    """A ReadSlice over the safetensors files of a model folder; it has no moments.

    Args:
        folder: model folder.
        family: the names and shapes that published files may have instead.

    Raises:
        ModelError: as `weight_files`; or a file that is no safetensors file.
    """

    def __init__(self, folder: Path, family: MegatronFamily) -> None:
        self.folder, self.family = folder, family
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        paths = weight_files(folder)
        try:
            for path in paths:
                file = self._stack.enter_context(safe_open(str(path), framework="pt"))
                self._files.update((name, file) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise ModelError(f"model.path: {folder} cannot be loaded: {error}") from error

    def __enter__(self) -> PretrainedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def name_in_files(self, name: str) -> str | None:
        """What the files call a tensor; None where they do not have it."""
        if name in self._files:
            return name
        for ours, theirs in self.family.file_prefixes:
            if (
                name.startswith(ours)
                and (renamed := theirs + name.removeprefix(ours)) in self._files
            ):
                return renamed
        return None

    def check(
        self, shapes: dict[str, tuple[int, ...]], passed_over: re.Pattern[str] = _NO_NAME
    ) -> None:
        """Raise ModelError unless the files hold exactly these tensors, and no others but those of
        multi-token prediction and of names that are passed over."""
        found = {name: self.name_in_files(name) for name in shapes}
        missing = [name for name, there in found.items() if there is None]
        odd = [
            f"{name} {self._shape(there)} instead of {shape}"
            for name, shape in shapes.items()
            if (there := found[name]) is not None
            and self._shape(there) != shape
            and not self._is_transposed(name, shape)
        ]
        extra = set(self._files) - set(found.values())
        left = {name for name in extra if not passed_over.search(name)}
        raise_misfits(
            self.folder,
            {"missing_keys": missing, "unexpected_keys": left, "mismatched_keys": odd},
        )

    def _shape(self, there: str) -> tuple[int, ...]:
        return tuple(self._files[there].get_slice(there).get_shape())

    def _is_transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the file has the last two dimensions swapped. A square tensor is taken as it is,
        as transformers takes it."""
        there = self.name_in_files(name)
        if there is None or not name.endswith(self.family.transposed_in_files or ("\0",)):
            return False
        return self._shape(there) != shape and self._shape(there) == (*shape[:-2], *shape[:-3:-1])

    def __call__(self, kind: Kind, box: TensorSlice) -> Tensor | None:
        """A box of a weight as float32 on CPU; None for a moment."""
        if kind != "model":
            return None
        name = self.name_in_files(box.name)
        if name is None:
            raise ModelError(f"model.path: {self.folder} has no tensor {box.name}")
        tensor = self._files[name].get_slice(name)
        value: Tensor
        if self._is_transposed(box.name, box.shape):
            *outer, rows, columns = box.index
            value = tensor[(*outer, columns, rows)].transpose(-1, -2)
        else:
            value = tensor[box.index]
        return value.to(torch.float32)
