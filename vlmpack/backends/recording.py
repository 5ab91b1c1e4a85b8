"""A stretch of computation, forward and backward, that is recorded once and then replayed.

    CudaRecording    two CUDA graphs: one launch in the place of thousands
    TapeRecording    the operators in their order, run one by one: the same on any device

Both keep what Python decided while they were recorded, and read tensors where these lie: a stretch
is fed by writing into the tensors that it read, and gives what it gave into the same places again.
A number that was read from a tensor, or the length of a segment, is the first row's for ever. So a
tape on a CPU shows what a CUDA graph would do, but for its speed: the tests of captured decoders
run on one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from vlmpack.errors import CapabilityError

Stretch = Callable[[], Tensor]
"""Computes one tensor from others that stay where they are."""

WARM_UPS = 3
"""Runs before a CUDA capture, in which libraries make their workspaces and tune their kernels."""


class Recording(Protocol):
    """A recorded stretch: what comes back is written over by the next replay."""

    def forward(self) -> Tensor:
        """Its output, for what its inputs hold now."""

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Gradients of what it was recorded with respect to, behind the `forward` of the same
        inputs.

        Args:
            gradient: of the output.
        """


class Recorder(Protocol):
    """Makes a recording."""

    def __call__(self, stretch: Stretch, wrt: Sequence[Tensor]) -> Recording:
        """Record a stretch and its backward pass.

        Args:
            stretch: run more than once, with what its inputs hold now.
            wrt: tensors that ask for a gradient and get one.
        """


class CudaRecording:
    """Two CUDA graphs that share a pool of memory.

    Gradients are taken by `torch.autograd.grad`: hooks on parameters, DDP's among them, are none of
    the graphs', and no graph writes into a `.grad`. Nodes of autograd are bound to the stream that
    they are made on, and one that lives on makes a capture on another stream wait for its own: so
    there is one stream for all, and cycles of Python's that may hold nodes are collected before.
    """

    def __init__(self, stretch: Stretch, wrt: Sequence[Tensor]) -> None:
        gc.collect()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                output = stretch()
                gradients = torch.autograd.grad(output, wrt, torch.zeros_like(output))
                del output, gradients
        torch.cuda.current_stream().wait_stream(side)
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Another thread, NCCL's watchdog, asks events in the meantime: no fault of this capture.
        mode = "thread_local"
        with torch.cuda.graph(self._graphs[0], stream=side, capture_error_mode=mode):
            output = stretch()
        self._output, self._gradient = output.detach(), torch.empty_like(output)
        pool = self._graphs[0].pool()
        with torch.cuda.graph(self._graphs[1], pool, side, capture_error_mode=mode):
            self._gradients = torch.autograd.grad(output, wrt, self._gradient)

    def forward(self) -> Tensor:
        """See Recording."""
        self._graphs[0].replay()
        return self._output

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See Recording."""
        self._gradient.copy_(gradient)
        self._graphs[1].replay()
        return self._gradients


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the stretch's own, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One operator: its arguments, with `_Made` for tensors of the stretch, and what it makes."""

    operator: Any
    args: list[Any]
    layout: TreeSpec
    makes: list[_Made | None]


_FOLLOWS_VALUES = {
    torch.Tag.data_dependent_output: "a number that the host reads from a tensor",
    torch.Tag.dynamic_output_shape: "a shape that follows from what a tensor holds",
}


def _refuse_values(operator: Any, args: Any) -> None:
    """Raise CapabilityError for an operator that no recording can hold."""
    if operator is torch.ops.aten.index.Tensor:  # by numbers it is a gather, of their shape
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        if not masks:
            return
    for tag, what in _FOLLOWS_VALUES.items():
        if tag in operator.tags:
            raise CapabilityError(f"{operator} gives {what}, which cannot be recorded")


def _finished(result: Any) -> Any:
    """What an operator gave, where it is a collective with its work done.

    A process group may compute in `wait`, out of sight or in operators of its own on what it holds
    of this one call. So a tape waits inside of the operator, and hands on a work that is done.
    """
    leaves, layout = tree_flatten(result)
    works = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.ScriptObject)]
    if not works:
        return result
    from torch._C._distributed_c10d import FakeWork

    for place in works:
        leaves[place].wait()
        leaves[place] = FakeWork().boxed()
    return tree_unflatten(leaves, layout)


class _Tape(TorchDispatchMode):
    """Writes down operators, below autograd, as they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self._made: dict[int, tuple[_Made, Tensor]] = {}  # the tensor too: no id is used twice

    def place(self, value: Any) -> Any:
        """What stands for a value: the number of a tensor that was made, or itself."""
        return self._made[id(value)][0] if id(value) in self._made else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_values(func, args)
        result = _finished(func(*args, **(kwargs or {})))
        leaves, layout = tree_flatten((args, kwargs or {}))
        given = {id(leaf) for leaf in leaves}
        placed = [self.place(leaf) for leaf in leaves]
        makes: list[_Made | None] = []
        for leaf in tree_leaves(result):
            is_new = isinstance(leaf, Tensor) and id(leaf) not in given
            if is_new and id(leaf) not in self._made:
                self._made[id(leaf)] = _Made(len(self._made)), leaf
            found = self.place(leaf)
            makes.append(found if isinstance(found, _Made) else None)
        self.steps.append(_Step(func, placed, layout, makes))
        return result


class TapeRecording:
    """The operators of a stretch in their order, run one by one. Functions that torch compiles are
    recorded as they are written: their kernels are no operators.

    Raises:
        CapabilityError: the host reads a number, or a shape follows from what a tensor holds.
    """

    def __init__(self, stretch: Stretch, wrt: Sequence[Tensor]) -> None:
        tape = _Tape()
        with torch.compiler.set_stance("force_eager"):
            with tape:
                output = stretch()
                self._output = tape.place(output.detach())
            self._split = len(tape.steps)
            self._gradient = torch.empty_like(output)
            with tape:
                found = torch.autograd.grad(output, wrt, self._gradient)
                self._gradients = [tape.place(each) for each in found]
        self.steps = tape.steps
        self._values: dict[_Made, Any] = {}
        self._drops = self._last_uses()

    def forward(self) -> Tensor:
        """See Recording."""
        self._values = {}
        self._run(range(self._split))
        output: Tensor = self._values[self._output]
        return output

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See Recording."""
        self._gradient.copy_(gradient)
        self._run(range(self._split, len(self.steps)))
        values, self._values = self._values, {}
        return tuple(values.get(each, each) for each in self._gradients)

    def _last_uses(self) -> list[list[_Made]]:
        """What no later step reads, by step."""
        kept = {self._output, *(each for each in self._gradients if isinstance(each, _Made))}
        last: dict[_Made, int] = {}
        for number, step in enumerate(self.steps):
            used = (*step.args, *step.makes)
            last.update({each: number for each in used if isinstance(each, _Made)})
        drops: list[list[_Made]] = [[] for _ in self.steps]
        for each, number in last.items():
            if each not in kept:
                drops[number].append(each)
        return drops

    def _run(self, numbers: range) -> None:
        values = self._values
        # Casts are among the steps; autocast around a replay would add others.
        with torch.no_grad(), torch.autocast(self._gradient.device.type, enabled=False):
            for number in numbers:
                step = self.steps[number]
                leaves = [values[x] if isinstance(x, _Made) else x for x in step.args]
                args, kwargs = tree_unflatten(leaves, step.layout)
                result = tree_leaves(_finished(step.operator(*args, **kwargs)))
                for made, value in zip(step.makes, result, strict=True):
                    if made is not None:
                        values[made] = value
                for made in self._drops[number]:
                    del values[made]


def recorder_on(device: torch.device) -> Recorder:
    """What records on a device."""
    return CudaRecording if device.type == "cuda" else TapeRecording
