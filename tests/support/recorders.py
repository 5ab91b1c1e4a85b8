"""What tensors are made, and what the host reads, while some code runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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

TOWER_CALLS = frozenset({"image_features", "_features"})
"""The methods of the engines' models that call the vision tower: PackedVLM's, MegatronVLM's."""

Reader = Literal["ours", "tower", "torch.optim", "megatron"]
"""The vision tower is transformers' code. torch's AdamW reads the step count of each parameter,
which it keeps in host memory on any device."""


def _reader(frames: list[traceback.FrameSummary], file: str) -> Reader:
    if any(frame.name in TOWER_CALLS for frame in frames):
        return "tower"
    if any("/torch/optim/" in frame.filename for frame in frames[-4:]):
        return "torch.optim"
    return "megatron" if "/megatron/core/" in file else "ours"


@dataclass(frozen=True)
class Read:
    """One value that Python read from a tensor.

    Args:
        method: of the tensor.
        file: of the caller, torch's own files left out.
        function: the caller.
        reader: whose read it is.
    """

    method: str
    file: str
    function: str
    reader: Reader

    @property
    def place(self) -> tuple[str, str]:
        """(method, file name:function)."""
        return self.method, f"{self.file.rpartition('/')[2]}:{self.function}"


class HostReads(TorchFunctionMode):
    """Records where tensor values are read by Python.

    A function mode, because `tolist` of a CPU tensor dispatches no operator. Other function modes
    may run inside it: what they pass on is their caller's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and "cpu" in [a for a in (args or ())[1:] if isinstance(a, str)]
        if name in READS or to_host:
            frames = traceback.extract_stack(sys._getframe(1))
            last = [
                frame
                for frame in frames
                if "/torch/" not in frame.filename and frame.name != "__torch_function__"
            ][-1]
            reader = _reader(frames, last.filename)
            if reader == "torch.optim":
                assert args[0].device.type == "cpu", "an optimizer's step count on the device"
            self.reads.append(Read(name, last.filename, last.name, reader))
        return func(*args, **(kwargs or {}))

    def of(self, reader: Reader) -> list[tuple[str, str]]:
        """(method, file name:function) of one reader's, in order."""
        return [read.place for read in self.reads if read.reader == reader]

    @property
    def ours(self) -> list[tuple[str, str]]:
        """Reads of vlmpack's own code."""
        return self.of("ours")

    @property
    def of_the_tower(self) -> list[tuple[str, str]]:
        """Reads inside the vision tower."""
        return self.of("tower")

    @property
    def of_megatron(self) -> list[tuple[str, str]]:
        """Reads in Megatron's own code."""
        return self.of("megatron")
