"""Adapters in peft's format, read box by box as a checkpoint is.

Each process reads only what it holds, whatever engine and layout a run has. Components that were
trained in full are read too (peft's `modules_to_save`). A pickle is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.backends.policy import TrainingPolicy, component_of, is_adapter
from vlmpack.errors import ModelError, as_model_error
from vlmpack.families.base import ModulePaths
from vlmpack.model_folder.safetensors_read import DTYPES, StoredTensor, read_into, tensors_of
from vlmpack.model_folder.weights import first
from vlmpack.words import counted

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""In front of every name in an adapter's file: peft's wrapper around a model."""
ADAPTER = "default"
"""peft's name for the one adapter of a run."""
_ENDS = {
    f".lora_{kind}{end}": f".lora_{kind}.{ADAPTER}.weight"
    for kind, end in (("A", ".weight"), ("B", ".weight"), ("magnitude_vector", ""))
}
"""Ends of names in the file, and of the parameters that they are."""


def weights_file(folder: Path) -> Path:
    """The file of an adapter folder's tensors.

    Raises:
        ModelError: it is not there; the message has no key in front.
    """
    path = folder / WEIGHTS
    if path.is_file():
        return path
    pickled = folder / "adapter_model.bin"
    hint = f", and {pickled.name} is a pickle, which is never read" if pickled.is_file() else ""
    raise ModelError(f"{folder} has no {WEIGHTS}{hint}; expected adapters in peft's format")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The tensors of an adapter folder.

    Args:
        tensors: by the names of their parameters, those of peft's layers included.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> AdapterFolder:
        """Read the header of a folder's file.

        Raises:
            ModelError: it is missing or damaged, or a tensor has a dtype that is not read.
        """
        try:
            stored = tensors_of(weights_file(folder))
        except ValueError as error:
            raise ModelError(str(error)) from error
        for tensor in stored:
            if tensor.dtype not in DTYPES:
                raise ModelError(
                    f"{tensor.file} has {tensor.name} as {tensor.dtype}; expected one of "
                    f"{', '.join(DTYPES)}"
                )
        return cls(folder, {_parameter(tensor.name): tensor for tensor in stored})

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        policy: TrainingPolicy,
        paths: ModulePaths,
        tied: Mapping[str, str],
    ) -> None:
        """Check that each tensor has its trained parameter, and each adapter its tensors.

        Args:
            tied: second names of shared parameters, each with the name of the parameter that it
                shares.

        Raises:
            ModelError: they do not fit. The message says what differs and what to set.
        """
        own = {name for name in self.tensors if tied.get(name) not in shapes}
        missing = sorted(name for name in shapes if is_adapter(name) and name not in own)
        unexpected = sorted(own - shapes.keys())
        if full := [name for name in unexpected if not is_adapter(name)]:
            component = component_of(full[0], paths)
            raise ModelError(
                f"{self.folder} has weights of the {component} that were trained in full "
                f"({first(full)}), but trainable.{component} is {policy.mode(component)}. Use "
                "full there, or merge the adapters first: vlmpack merge"
            )
        if missing or unexpected:
            found = sorted({_layer(name).rpartition(".")[2] for name in own if is_adapter(name)})
            only = [
                f"{counted(len(layers), 'layer')} of {where} alone ({first(layers)})"
                for where, names in (("the folder", unexpected), ("the recipe", missing))
                if (layers := sorted({_layer(name) for name in names}))
            ]
            raise ModelError(
                f"the adapters in {self.folder} are not those of the recipe: "
                f"{' and '.join(only)}. Expected the same layers. The folder's are named "
                f"{', '.join(found) or 'nothing'} (trainable.lora.targets)"
            )
        for name in own:
            if self.tensors[name].shape != shapes[name]:
                raise ModelError(
                    f"{self.folder} has {name} with shape {self.tensors[name].shape}, the model "
                    f"that the recipe names {shapes[name]}; expected adapters of that model and "
                    "rank"
                )

    def read(self, kind: Kind, box: TensorSlice) -> Tensor | None:
        """Read a box of a parameter on CPU, as `vlmpack.backends.boxes.ReadSlice`. None where the
        folder has no such tensor.

        Raises:
            ModelError: the file cannot be read.
        """
        stored = self.tensors.get(box.name)
        if kind != "model" or stored is None:
            return None
        value = torch.empty(box.lengths, dtype=DTYPES[stored.dtype])
        with as_model_error(f"{stored.file} cannot be read", OSError, ValueError):
            read_into(value, stored, box.index)
        return value


def _parameter(name: str) -> str:
    """The parameter that a tensor of the file is."""
    name = name.removeprefix(PREFIX)
    for end, parameter in _ENDS.items():
        if name.endswith(end):
            return name.removesuffix(end) + parameter
    return name


def _layer(name: str) -> str:
    """The layer that an adapter's parameter belongs to."""
    return name.partition(".lora_")[0]
