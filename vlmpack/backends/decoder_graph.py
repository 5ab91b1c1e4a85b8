"""The decoder of rows of one shape, recorded once and replayed; around it everything is eager.

    tower, merge -> static buffers (embeddings, where tokens are, boundaries, deep features),
    refilled in place -> recorded decoder -> label tokens, head, loss -> gradient of the hidden
    states -> recorded backward pass -> gradients of embeddings, deep features and weights, to
    autograd

Weights are read in place, so an optimizer step needs no new recording. Their gradients leave the
recording as those of any other operator, so accumulation, clipping and replicas' hooks work as
usual, and `.grad` may be None. The recording costs a second copy of the decoder's trained
gradients.

There are two kinds of recording, each of a forward and a backward pass:

    CudaRecording    two CUDA graphs: one launch in the place of thousands
    TapeRecording    the operators in their order, run one by one: the same on any device

Both keep what Python decided during the recording, and read tensors in place. For a replay, write
the input into the tensors that the recording read. The output is again in the same tensors. A
number read from a tensor, or the length of a segment, stays that of the first row. A tape behaves
as a CUDA graph does, apart from speed, so tests of captured decoders run on a CPU.

Shapes: T slots of a row, D width, N segments (the same in every row).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from vlmpack.errors import CapabilityError
from vlmpack.packing import Batch, PackedBatch, PackedSeqParams
from vlmpack.packing.row_layout import UnknownLengths

Computation = Callable[[], Tensor]
"""Computes one tensor from others that stay where they are."""

WARM_UPS = 3
"""Runs before a CUDA capture, in which libraries make their workspaces and tune their kernels."""


class Recording(Protocol):
    """A recorded computation. The next replay overwrites the tensors that it returned."""

    def forward(self) -> Tensor:
        """Its output for the present values of its inputs."""

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Gradients with respect to the recorded inputs, after the `forward` of the same inputs.

        Args:
            gradient: of the output.
        """


class Recorder(Protocol):
    """Makes a recording."""

    def __call__(self, computation: Computation, wrt: Sequence[Tensor]) -> Recording:
        """Record a segment of computation and its backward pass.

        Args:
            wrt: tensors that ask for a gradient and get one.
        """


class CudaRecording:
    """Two CUDA graphs that share a pool of memory.

    Gradients are taken by `torch.autograd.grad`. Hooks on parameters, DDP's among them, are not
    recorded, and no graph writes into a `.grad`. Autograd's nodes are bound to the stream that
    created them, and a live node makes a capture on another stream wait for its own. So all graphs
    share one stream, and Python's cycles that may hold nodes are collected first.
    """

    def __init__(self, computation: Computation, wrt: Sequence[Tensor]) -> None:
        gc.collect()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                output = computation()
                gradients = torch.autograd.grad(output, wrt, torch.zeros_like(output))
                del output, gradients
        torch.cuda.current_stream().wait_stream(side)
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events meanwhile, which must not fail this capture.
        mode = "thread_local"
        with torch.cuda.graph(self._graphs[0], stream=side, capture_error_mode=mode):
            output = computation()
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
    """A tensor that the computation makes, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One operator: its arguments, with `_Made` for tensors that it made, and what it makes."""

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
    """What an operator returned. A collective is returned with its work done.

    A process group may compute inside `wait`, or in operators of its own on tensors of this one
    call. So a tape waits inside the operator, and returns a finished work.
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
        """The number of a tensor that an operator made, or the value itself."""
        return self._made[id(value)][0] if id(value) in self._made else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_values(func, args)
        result = _finished(func(*args, **(kwargs or {})))
        leaves, layout = tree_flatten((args, kwargs or {}))
        given = {id(leaf) for leaf in leaves}
        places = [self.place(leaf) for leaf in leaves]
        makes: list[_Made | None] = []
        for leaf in tree_leaves(result):
            is_new = isinstance(leaf, Tensor) and id(leaf) not in given
            if is_new and id(leaf) not in self._made:
                self._made[id(leaf)] = _Made(len(self._made)), leaf
            found = self.place(leaf)
            makes.append(found if isinstance(found, _Made) else None)
        self.steps.append(_Step(func, places, layout, makes))
        return result


class TapeRecording:
    """The operators of a computation in their order, run one by one.

    Functions that torch compiles are recorded uncompiled, because their kernels are no operators.

    Raises:
        CapabilityError: the host reads a number, or a shape follows from what a tensor holds.
    """

    def __init__(self, computation: Computation, wrt: Sequence[Tensor]) -> None:
        tape = _Tape()
        with torch.compiler.set_stance("force_eager"):
            with tape:
                output = computation()
                self._output = tape.place(output.detach())
            self._split = len(tape.steps)
            self._gradient = torch.empty_like(output)
            with tape:
                gradients = torch.autograd.grad(output, wrt, self._gradient)
                self._gradients = [tape.place(each) for each in gradients]
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
        results = {self._output, *(each for each in self._gradients if isinstance(each, _Made))}
        last: dict[_Made, int] = {}
        for number, step in enumerate(self.steps):
            used = (*step.args, *step.makes)
            last.update({each: number for each in used if isinstance(each, _Made)})
        drops: list[list[_Made]] = [[] for _ in self.steps]
        for each, number in last.items():
            if each not in results:
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
    """The recorder for a device."""
    return CudaRecording if device.type == "cuda" else TapeRecording


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRow:
    """Everything that a captured decoder reads of a row.

    Args:
        embeds: what enters the first layer; (T, D) or as the engine has it.
        boundaries: (N + 1,) int32, physical.
        where: by name, token positions or what is derived from them; without gradient.
        deep: what the first layers add to their outputs, each like `embeds`.
    """

    embeds: Tensor
    boundaries: Tensor
    where: Mapping[str, Tensor]
    deep: tuple[Tensor, ...] = ()

    def features(self) -> dict[str, Tensor]:
        """By name, what may get a gradient."""
        numbered = {f"deep features {number}": layer for number, layer in enumerate(self.deep)}
        return {"embeddings": self.embeds, **numbered}

    def named(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return {**self.features(), **self.where, "boundaries": self.boundaries}

    def static(self) -> StaticRow:
        """Buffers with the same values. If a feature needs a gradient, its buffer does too."""
        trained = any(feature.requires_grad for feature in self.features().values())

        def buffer(tensor: Tensor) -> Tensor:
            return tensor.detach().clone(memory_format=torch.contiguous_format)

        return StaticRow(
            embeds=buffer(self.embeds).requires_grad_(trained),
            boundaries=buffer(self.boundaries),
            where={name: buffer(tensor) for name, tensor in self.where.items()},
            # Deep features of a row without images ask for no gradient, those of others do.
            deep=tuple(buffer(layer).requires_grad_(trained) for layer in self.deep),
        )


def boundaries_alone(boundaries: Tensor, width: int) -> PackedSeqParams:
    """The boundaries of segments as a tensor whose numbers the host does not know.

    Args:
        boundaries: (N + 1,) int32, physical.
        width: T, also used as the longest segment, which kernels take as a Python number.
    """
    return PackedSeqParams(
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=width,
        max_seqlen_kv=width,
        segment_lengths=UnknownLengths(boundaries.shape[0] - 1),
    )


class _OtherLeaves:
    """Parameters over the memory of others, which replace them during a recording.

    Replicas' wrappers keep the autograd node that accumulates a weight's gradient, and the stream
    that it was created on. A backward pass captured on another stream would make the two streams
    wait for each other, which breaks the capture. A leaf of the recording's own has no such node.
    """

    def __init__(self, module: nn.Module, weights: Sequence[nn.Parameter]) -> None:
        self.of = {weight: nn.Parameter(weight.detach()) for weight in weights}
        for weight, other in self.of.items():
            vars(other).update(vars(weight))  # Megatron's marks
        self._places = [
            (each._parameters, name, weight)
            for each in module.modules()
            for name, weight in each._parameters.items()
            if weight is not None and weight in self.of
        ]

    @contextmanager
    def put(self) -> Iterator[None]:
        """While it is open, the module computes with the others."""
        for held, name, weight in self._places:
            held[name] = self.of[weight]
        try:
            yield
        finally:
            for held, name, weight in self._places:
                held[name] = weight


class DecoderGraph:
    """Records the decoder at the first training row, and replays it for all others.

    Args:
        hooks_take_gradients: whether hooks move each gradient elsewhere before the next replay.
    """

    def __init__(
        self,
        decoder: nn.Module,
        run: Callable[[StaticRow], Tensor],
        recorder: Recorder,
        *,
        hooks_take_gradients: bool = False,
    ) -> None:
        self._decoder, self._run, self._recorder = decoder, run, recorder
        self.hooks_take_gradients = hooks_take_gradients
        self.captures, self.replays = 0, 0
        self._static: StaticRow | None = None
        self._weights: list[nn.Parameter] = []
        self.recording: Recording | None = None

    def takes(self, batch: Batch) -> bool:
        """Whether this is a training row of the shape; others run eager."""
        return torch.is_grad_enabled() and isinstance(batch, PackedBatch) and batch.fixed_shape

    def __call__(self, row: StaticRow) -> Tensor:
        """The decoder's hidden states, which the next row overwrites.

        Raises:
            CapabilityError: it has another shape than the one that was recorded.
        """
        if self._static is None:
            self._static = self._record(row)
        held, given = self._static.features(), row.features()
        self._refill(self._static, row)
        leaves = [given[name] for name, buffer in held.items() if buffer.requires_grad]
        self.replays += 1
        output: Tensor = _Replayed.apply(self, *leaves, *self._weights)  # type: ignore[no-untyped-call]
        return output

    def _record(self, row: StaticRow) -> StaticRow:
        """Make the buffers and the recording, by what the first row has."""
        static = row.static()
        weights = [weight for weight in self._decoder.parameters() if weight.requires_grad]
        others = _OtherLeaves(self._decoder, weights)
        computation = self._computation(static, others)
        leaves = [buffer for buffer in static.features().values() if buffer.requires_grad]
        # The gradient of a computation under autocast is taken outside of it, as in the step.
        with torch.autocast(row.embeds.device.type, enabled=False), torch.enable_grad():
            output = computation()
            gradients = torch.autograd.grad(
                output, [*leaves, *others.of.values()], torch.zeros_like(output), allow_unused=True
            )
            reached = zip(weights, gradients[len(leaves) :], strict=True)
            self._weights = [weight for weight, grad in reached if grad is not None]
            del output, gradients, reached
            read = (others.of[weight] for weight in self._weights)
            self.recording = self._recorder(computation, [*leaves, *read])
        self.captures += 1
        return static

    def _computation(self, static: StaticRow, others: _OtherLeaves) -> Callable[[], Tensor]:
        """The decoder over the buffers, in the dtype of autocast where that is on."""
        kind = static.embeds.device.type
        casts, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def computation() -> Tensor:
            # A cast weight that autocast keeps would be the first row's for ever.
            cast = torch.autocast(kind, dtype=dtype, enabled=casts, cache_enabled=False)
            with others.put(), cast:
                return self._run(static)

        return computation

    def _refill(self, static: StaticRow, row: StaticRow) -> None:
        """Write a row into the buffers."""
        buffers, given = static.named(), row.named()
        shown = {name: (tuple(t.shape), t.dtype) for name, t in given.items()}
        held = {name: (tuple(t.shape), t.dtype) for name, t in buffers.items()}
        if shown != held:
            name = next(n for n in (*held, *shown) if shown.get(n) != held.get(n))
            raise CapabilityError(
                f"the captured decoder has {name} of (shape, dtype) {held.get(name)}, the "
                f"row has {shown.get(name)}; set training.cuda_graphs: none"
            )
        for name, tensor in given.items():
            if tensor.requires_grad and not buffers[name].requires_grad:
                raise CapabilityError(f"the captured decoder gives {name} no gradient, and has to")
        with torch.no_grad():
            for name, tensor in given.items():
                buffers[name].copy_(tensor, non_blocking=True)


class _Replayed(torch.autograd.Function):
    """A recording as one operator of the step."""

    @staticmethod
    def forward(ctx: Any, graph: DecoderGraph, *wrt: Tensor) -> Tensor:
        assert graph.recording is not None
        ctx.graph, ctx.turn, ctx.wrt = graph, graph.replays, wrt
        return graph.recording.forward().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        graph: DecoderGraph = ctx.graph
        assert graph.recording is not None
        if ctx.turn != graph.replays:
            raise RuntimeError("another row went through the captured decoder before this backward")
        gradients = graph.recording.backward(grads[0])

        def stays(tensor: Tensor) -> bool:
            # What a leaf without a gradient is given becomes its `.grad` as it is, and the next
            # replay would write over it.
            return tensor.is_leaf and tensor.grad is None and not graph.hooks_take_gradients

        return None, *(
            grad.clone() if stays(tensor) else grad.detach()
            for tensor, grad in zip(ctx.wrt, gradients, strict=True)
        )
