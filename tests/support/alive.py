"""Bytes of tensors that a computation leaves alive, and the most that it held on the way.

`kept_bytes` asks autograd's hooks, which do not see what a checkpoint keeps. Here every storage
that an operator makes is followed to its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """While it is open, follows the storages of all results.

    Args:
        own: tensors that are not counted: inputs, weights.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self.own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self.held: dict[int, int] = {}
        self.now = self.peak = self.after_forward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._follow(each)
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.held or storage.data_ptr() in self.own:
            return
        self.held[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.held.pop(key)
