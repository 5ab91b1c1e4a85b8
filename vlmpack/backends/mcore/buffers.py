"""Buffers that a model folder holds, such as the bias by which experts are chosen: no parameters,
so no step changes them, and a checkpoint has none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vlmpack.backends.boxes import ReadSlice, whole
from vlmpack.backends.mcore.router import biased_routers
from vlmpack.backends.mcore.weights.nemotron_h import BIAS
from vlmpack.backends.policy import is_untouched
from vlmpack.errors import CapabilityError
from vlmpack.families.base import Family


@dataclass(frozen=True, slots=True)
class KeptBuffers:
    """Those of a model.

    Args:
        like: of their shapes and dtypes, without values, by transformers' names.
    """

    like: Mapping[str, Tensor]

    @classmethod
    def of(cls, skeleton: Any, family: Family) -> KeptBuffers:
        """Those that transformers saves.

        Args:
            skeleton: the transformers model without weights.
            family: says what of it no sample reaches, and where the tower lies.

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
        """Fill those of a stage's layers.

        Args:
            layers: Megatron's.
            reader: of the model folder.
            language: where the transformers model has its decoder.

        Raises:
            CapabilityError: a router's layer has no such buffer, or several.
        """
        for number, router in biased_routers(layers):
            name = self._bias_under(f"{language}.layers.{number}.")
            router.expert_bias.copy_(self._value(reader, name))

    def fill_tower(self, tower: nn.Module | None, prefix: str, reader: ReadSlice) -> None:
        """Fill those of a vision tower.

        Args:
            tower: with its projector; None on stages without it.
            prefix: in front of its names in the transformers model.
            reader: of the model folder.
        """
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
