"""The weights of a transformers folder, read box by box. No rank reads more than its own part.

Buffers of a folder are read here too, such as the bias by which experts are chosen. They are no
parameters, so no step changes them, and a checkpoint has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.boxes import Kind, ReadSlice, TensorSlice, whole
from vlmpack.backends.hf.deferred import read_box
from vlmpack.backends.hf.load import open_model
from vlmpack.backends.mcore.router import biased_routers
from vlmpack.backends.mcore.weights.language import BIAS
from vlmpack.backends.policy import is_untouched
from vlmpack.backends.unused import load_by_headers
from vlmpack.errors import CapabilityError, ModelError, as_model_error
from vlmpack.families.base import Family
from vlmpack.model_folder.quantised import is_quantised
from vlmpack.model_folder.safetensors_read import DTYPES
from vlmpack.model_folder.weights import stored_tensors, weight_files


class PretrainedReader:
    """A ReadSlice over the weights of a model folder; it has no moments.

    transformers maps the names and shapes of files to its own, and says what is missing or left
    over. It is given tensors that were not read yet.

    Raises:
        ModelError: as `open_model`; or a weight of a dtype that is never read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tensors = chain.from_iterable(map(stored_tensors, weight_files(folder)))
        others = [stored for stored in tensors if stored.dtype not in DTYPES]
        others = [] if is_quantised(folder) else others  # codes become weights
        unused = load_by_headers(folder).unused if others else ()
        for stored in others:
            if stored not in unused:
                raise ModelError(
                    f"model.path: {stored.file} has {stored.name} as {stored.dtype}; the mcore "
                    f"engine reads {', '.join(DTYPES)}"
                )
        model = open_model(folder)
        self._tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tensors |= dict(model.named_buffers())

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError for a tensor that is missing or of another shape."""
        for name, shape in shapes.items():
            saved = tuple(self._tensor(name).shape)
            if saved != shape:
                raise ModelError(f"model.path: {self.folder} has {name} {saved} instead of {shape}")

    def __call__(self, kind: Kind, box: TensorSlice) -> Tensor | None:
        """A box of a weight as float32 on CPU; None for a moment."""
        if kind != "model":
            return None
        target = torch.empty(box.lengths, dtype=torch.float32)
        with as_model_error(f"model.path: {box.name} cannot be read", OSError, ValueError):
            read_box(self._tensor(box.name), box.index, target)
        return target

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"model.path: {self.folder} has no tensor {name}")
        return self._tensors[name]


@dataclass(frozen=True, slots=True)
class KeptBuffers:
    """The buffers of a model that transformers saves, by transformers' names."""

    like: Mapping[str, Tensor]

    @classmethod
    def of(cls, skeleton: Any, family: Family) -> KeptBuffers:
        """The buffers that transformers saves.

        Raises:
            CapabilityError: one that the mcore engine has no place for.
        """
        saved = skeleton.state_dict().keys()
        like = {name: buffer for name, buffer in skeleton.named_buffers() if name in saved}
        for name in like:
            in_tower = any(name.startswith(f"{part}.") for part in family.tower_modules())
            has_place = in_tower or name.endswith(f".{BIAS}")
            if not has_place and not is_untouched(name, family.modules):
                raise CapabilityError(
                    f"the mcore engine builds no place for the buffer {name}; use model.backend: hf"
                )
        return cls(like)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By transformers' names."""
        return {name: tuple(buffer.shape) for name, buffer in self.like.items()}

    def fill(self, layers: Any, reader: ReadSlice, language: str) -> None:
        """Fill the buffers of a stage's layers.

        Raises:
            CapabilityError: a router's layer has no such buffer, or several.
        """
        for number, router in biased_routers(layers):
            name = self._bias_under(f"{language}.layers.{number}.")
            router.expert_bias.copy_(self._value(reader, name))

    def fill_tower(self, tower: nn.Module | None, prefix: str, reader: ReadSlice) -> None:
        """Fill the buffers of a vision tower."""
        for name, buffer in tower.named_buffers() if tower is not None else ():
            if prefix + name in self.like:
                buffer.copy_(self._value(reader, prefix + name))

    def read(self, reader: ReadSlice) -> Iterator[tuple[str, Tensor]]:
        """All of them, whole, on CPU."""
        for name in self.like:
            yield name, self._value(reader, name)

    def _bias_under(self, layer: str) -> str:
        """The name of the bias in a layer, wherever its class has the router."""
        names = [name for name in self.like if name.startswith(layer) and name.endswith(f".{BIAS}")]
        if len(names) != 1:
            raise CapabilityError(
                f"the model has {len(names)} buffers {layer}*.{BIAS}, the mcore engine expects "
                f"one a layer; use model.backend: hf"
            )
        return names[0]

    def _value(self, reader: ReadSlice, name: str) -> Tensor:
        like = self.like[name]
        value = reader("model", whole(name, tuple(like.shape)))
        assert value is not None
        return value.to(like.dtype)
