"""Buffers that a model folder holds, such as the bias by which experts are chosen: no parameters,
so no step changes them, and a checkpoint has none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vlmpack.backends.boxes import whole
from vlmpack.backends.mcore.pretrained import PretrainedReader
from vlmpack.backends.mcore.router import biased_routers
from vlmpack.backends.mcore.weights.nemotron_h import BIAS
from vlmpack.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class KeptBuffers:
    """Those of a model.

    Args:
        shapes: by transformers' names.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, skeleton: Any) -> KeptBuffers:
        """Those that transformers saves.

        Raises:
            CapabilityError: one that the mcore engine has no place for.
        """
        saved = skeleton.state_dict().keys()
        shapes = {n: tuple(b.shape) for n, b in skeleton.named_buffers() if n in saved}
        unknown = [name for name in shapes if not name.endswith(f".{BIAS}")]
        if unknown:
            raise CapabilityError(
                f"the mcore engine builds no place for the buffer {unknown[0]}; use "
                f"model.backend: hf"
            )
        return cls(shapes)

    def fill(self, layers: Any, reader: PretrainedReader, language: str) -> None:
        """Fill those of a stage.

        Args:
            layers: Megatron's.
            reader: of the model folder.
            language: where the transformers model has its decoder.
        """
        for number, router in biased_routers(layers):
            name = f"{language}.layers.{number}.mixer.gate.{BIAS}"
            router.expert_bias.copy_(self._value(reader, name))

    def read(self, reader: PretrainedReader) -> Iterator[tuple[str, Tensor]]:
        """All of them, whole, float32, on CPU."""
        for name in self.shapes:
            yield name, self._value(reader, name)

    def _value(self, reader: PretrainedReader, name: str) -> Tensor:
        value = reader("model", whole(name, self.shapes[name]))
        assert value is not None
        return value
