"""What a computation keeps for its backward pass, as autograd says it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def kept_bytes(compute: Callable[[], object], own: Iterable[Tensor]) -> int:
    """Bytes of the storages that are kept; those of `own` (inputs, weights) are left out."""
    left_out = {x.untyped_storage().data_ptr() for x in own}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in left_out:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        compute()
    return sum(x.untyped_storage().nbytes() for x in kept.values())
