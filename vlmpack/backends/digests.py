"""Digests of weights that are not to move: any other bit makes another number."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Elements at a time, so that the 8-byte products take 32 MiB."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """(F,) int64 on the device: the bits of each tensor as integers, weighted by odd numbers.

    Integer sums do not depend on their order, so the same bits give the same number on every
    device. One changed element always changes it; several could cancel only by coincidence.
    """
    found = [digest(tensor) for tensor in tensors]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


def digest(tensor: Tensor) -> Tensor:
    """0-d int64 on the tensor's device."""
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    odd = 2 * torch.arange(min(CHUNK, bits.numel()), device=bits.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].long()
        total = 31 * total + (part * odd[: part.numel()]).sum()
    return total
