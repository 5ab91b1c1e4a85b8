"""What tensors are made, and what the host reads, while some code runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Made:
    """One tensor that an operator returned."""

    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class MadeTensors(TorchDispatchMode):
    """Records every tensor that any operator returns, in forward and backward alike."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.made.append(Made(str(func), tuple(leaf.shape), leaf.dtype))
        return result

    def where(self, condition: Callable[[Made], bool]) -> list[Made]:
        """Those that a condition holds for."""
        return [made for made in self.made if condition(made)]


READS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero"}
)
"""Tensor methods that wait for the device."""


class HostReads(TorchFunctionMode):
    """Records where tensor values are read by Python: (method, file of the caller, in the tower).

    A function mode, because `tolist` of a CPU tensor dispatches no operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, str, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and "cpu" in [a for a in (args or ())[1:] if isinstance(a, str)]
        if name in READS or to_host:
            frames = traceback.extract_stack(sys._getframe(1))
            callers = [f for f in frames if "/torch/" not in f.filename]
            last = callers[-1]
            tower = any(f.name == "image_features" for f in frames)
            self.reads.append((name, f"{last.filename.rpartition('/')[2]}:{last.name}", tower))
        return func(*args, **(kwargs or {}))

    @property
    def ours(self) -> list[tuple[str, str]]:
        """Reads outside the vision tower."""
        return [(name, place) for name, place, tower in self.reads if not tower]

    @property
    def of_the_tower(self) -> list[tuple[str, str]]:
        """Reads inside the vision tower, which is transformers' code."""
        return [(name, place) for name, place, tower in self.reads if tower]
