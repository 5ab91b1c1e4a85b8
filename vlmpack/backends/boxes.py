"""Boxes of whole tensors under transformers' names: what a rank writes and reads of a checkpoint.

Every engine says which boxes of which parameters it holds; a checkpoint is the union of the boxes
that all ranks wrote, so it can be read back by any other layout, or by the other engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["model", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"]
"""A parameter, one of AdamW's two moments of it, or, of moments that are 8-bit codes, the scales of
their blocks."""

MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
SCALES: Mapping[Kind, Kind] = {"exp_avg_scale": "exp_avg", "exp_avg_sq_scale": "exp_avg_sq"}
KINDS: tuple[Kind, ...] = ("model", *MOMENTS, *SCALES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """A box of one whole tensor.

    Args:
        name: transformers' name of the parameter.
        shape: of the whole tensor.
        start: first index of the box, by dimension.
        stop: one past the last index, by dimension.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def index(self) -> tuple[slice, ...]:
        """What selects the box in the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersection(self, other: TensorSlice) -> TensorSlice | None:
        """The part of the same tensor that both boxes hold; None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return TensorSlice(name=self.name, shape=self.shape, start=start, stop=stop)


def whole(name: str, shape: tuple[int, ...]) -> TensorSlice:
    """The box that is the whole tensor."""
    return TensorSlice(name=name, shape=shape, start=(0,) * len(shape), stop=shape)


ReadSlice = Callable[[Kind, TensorSlice], Tensor | None]
"""Reads a box on CPU; None where the checkpoint has no such tensor (a moment before step 1)."""
