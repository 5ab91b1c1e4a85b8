"""The weights of a transformers folder, read box by box. No rank reads more than its own part.

Buffers of a folder are read here too, such as the bias by which experts are chosen. They are no
parameters, so no step changes them, and a checkpoint has none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.boxes import Kind, ReadSlice, TensorSlice, whole
from vlmpack.backends.mcore.router import biased_routers
from vlmpack.backends.mcore.weights import MegatronFamily
from vlmpack.backends.mcore.weights.language import BIAS
from vlmpack.backends.policy import is_untouched
from vlmpack.errors import CapabilityError, ModelError, as_model_error
from vlmpack.families.base import Family
from vlmpack.model_folder.safetensors_read import DTYPES, StoredTensor, read_into, tensors_of
from vlmpack.model_folder.weights import raise_misfits, weight_files

_NO_NAME = re.compile("(?!)")

_APART = {
    "experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.up_proj": ("up_proj",),
    "experts.down_proj": ("down_proj",),
}
"""Last parts of names of tensors of all experts, and what files may have of each expert instead, in
the order of their rows."""


class PretrainedReader:
    """A ReadSlice over the safetensors files of a model folder; it has no moments.

    Args:
        family: the names and shapes that published files may have instead.
        tied: tensors that share a weight by the model's config; the files' values of both are one
            tensor.

    Raises:
        ModelError: as `weight_files`; or a file that is no safetensors file.
    """

    def __init__(
        self, folder: Path, family: MegatronFamily, tied: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.folder, self.family = folder, family
        self._files: dict[str, StoredTensor] = {}
        self._found: dict[str, dict[str, tuple[int, ...]]] = {}
        with as_model_error(f"model.path: {folder} cannot be loaded", ValueError):
            for path in weight_files(folder):
                self._files.update((stored.name, stored) for stored in tensors_of(path))
        for copy, name in tied.items():
            if (there := self.name_in_files(copy)) is not None:
                same = self._files.pop(there)
                if self.name_in_files(name) is None:
                    self._files[name] = same

    def __enter__(self) -> PretrainedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

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
        found = {name: self._sources(name, shape) for name, shape in shapes.items()}
        missing = [name for name, there in found.items() if not there]
        odd = [
            f"{name} {self._shape(there)} instead of {shape}"
            for name, sources in found.items()
            for there, shape in sources.items()
            if self._shape(there) != shape and not self._is_transposed(name, shape)
        ]
        extra = set(self._files) - {there for sources in found.values() for there in sources}
        left = {name for name in extra if not passed_over.search(name)}
        raise_misfits(
            self.folder,
            {"missing_keys": missing, "unexpected_keys": left, "mismatched_keys": odd},
        )

    def _sources(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """As `_look_up`, which is asked once a name."""
        if name not in self._found:
            self._found[name] = self._look_up(name, shape)
        return self._found[name]

    def _look_up(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The files' names of what a tensor is made of, each with its required shape.

        Experts that lie in the files one by one give several names, in their order. Nothing where
        one is missing.
        """
        there = self.name_in_files(name)
        if there is not None:
            return {there: shape}
        last = next((last for last in _APART if name.endswith(f".{last}")), None)
        if last is None:
            return {}
        stem, parts = name.removesuffix(last.partition(".")[2]), _APART[last]
        names = [
            self.name_in_files(f"{stem}{expert}.{part}.weight")
            for expert in range(shape[0])
            for part in parts
        ]
        each = (shape[1] // len(parts), *shape[2:])
        return {} if None in names else {name: each for name in names if name is not None}

    def _stacked(self, box: TensorSlice, sources: dict[str, tuple[int, ...]]) -> Tensor:
        """A box of the tensor of all experts, of files that have them one by one."""
        names, (experts, first_rows, columns) = list(sources), box.index
        parts, rows = len(names) // box.shape[0], next(iter(sources.values()))[0]
        made = torch.empty(box.lengths, dtype=torch.float32)
        rest = made.flatten(0, 1)
        for expert in range(experts.start, experts.stop):
            for part in range(parts):
                start = max(first_rows.start - part * rows, 0)
                stop = min(first_rows.stop - part * rows, rows)
                if start < stop:
                    name = names[expert * parts + part]
                    self._read(rest[: stop - start], name, (slice(start, stop), columns))
                    rest = rest[stop - start :]
        return made

    def _shape(self, there: str) -> tuple[int, ...]:
        return self._files[there].shape

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
        sources = self._sources(box.name, box.shape)
        if not sources:
            raise ModelError(f"model.path: {self.folder} has no tensor {box.name}")
        if len(sources) > 1:
            return self._stacked(box, sources)
        (name,) = sources
        value = torch.empty(box.lengths, dtype=torch.float32)
        target, index = value, box.index
        if self._is_transposed(box.name, box.shape):
            *outer, rows, columns = index
            index, target = (*outer, columns, rows), value.transpose(-1, -2)
        self._read(target, name, index)
        return value

    def _read(self, target: Tensor, name: str, index: tuple[slice, ...]) -> None:
        """Copy a box of a file's tensor."""
        stored = self._files[name]
        if stored.dtype not in DTYPES:
            raise ModelError(
                f"model.path: {stored.file} has {name} as {stored.dtype}; the mcore engine reads "
                f"{', '.join(DTYPES)}"
            )
        with as_model_error(f"model.path: {name} cannot be read", OSError, ValueError):
            read_into(target, stored, index)


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
            placed = in_tower or name.endswith(f".{BIAS}")
            if not placed and not is_untouched(name, family.modules):
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
