"""Boxes of whole tensors under transformers' names, which is what a rank writes and reads of a
checkpoint.

Every engine states which boxes of which parameters it holds. A checkpoint is the union of the boxes
that all ranks wrote, so any other layout or engine can read it.

The digest of weights that must not change is also here. Any changed bit changes the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
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
    def words(self) -> str:
        """The tensor's name, and which elements of it where they are not all."""
        if self.lengths == self.shape:
            return self.name
        ranges = (f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))
        return f"{self.name}[{', '.join(ranges)}]"

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices that select the box in the whole tensor."""
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


CHUNK = 1 << 22
"""Elements at a time, so that the 8-byte products take 32 MiB."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """(F,) int64 on the device: the bits of each tensor as integers, weighted by odd numbers.

    Integer sums do not depend on their order, so the same bits give the same number on every
    device. One changed element always changes it. Several could cancel only by coincidence.
    """
    each = [digest(tensor) for tensor in tensors]
    return torch.stack(each) if each else torch.zeros(0, dtype=torch.int64, device=device)


def digest(tensor: Tensor) -> Tensor:
    """0-d int64 on the tensor's device."""
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    factors = 2 * torch.arange(min(CHUNK, bits.numel()), device=bits.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].long()
        total = 31 * total + (part * factors[: part.numel()]).sum()
    return total
