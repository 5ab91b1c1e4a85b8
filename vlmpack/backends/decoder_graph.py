"""The decoder of rows of one shape, recorded once and replayed; around it everything is eager.

    tower, merge -> static buffers (embeddings, where tokens are, boundaries, deep features),
    refilled in place -> recorded decoder -> label tokens, head, loss -> gradient of the hidden
    states -> recorded backward pass -> gradients of embeddings, deep features and weights, to
    autograd

Weights are read where they lie, so an optimizer step needs no new recording. Their gradients leave
the recording as those of any other operator: accumulation, clipping and the hooks of replicas see
nothing else, and `.grad` may be None. It costs a second copy of the decoder's trained gradients.

Shapes: T slots of a row, D width, N segments (the same in every row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.recording import Recorder, Recording
from vlmpack.errors import CapabilityError
from vlmpack.packing import Batch, PackedBatch, PackedSeqParams
from vlmpack.packing.row_layout import UnreadLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRow:
    """What a captured decoder reads of a row, and nothing else.

    Args:
        embeds: what enters the first layer; (T, D) or as the engine has it.
        boundaries: (N + 1,) int32, physical.
        where: by name, where its tokens are: positions, or what is made of them. No gradient.
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
        """Buffers that hold the same; features ask for a gradient where one of them does."""
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
    """Where segments end by the boundaries' tensor, whose numbers the host does not know.

    Args:
        boundaries: (N + 1,) int32, physical.
        width: T, which stands for the longest segment too: kernels take that as a Python number.
    """
    return PackedSeqParams(
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=width,
        max_seqlen_kv=width,
        segment_lengths=UnreadLengths(boundaries.shape[0] - 1),
    )


class _OtherLeaves:
    """Parameters over the memory of others, to be in their places while a recording is made.

    Replicas' wrappers keep the node of autograd that adds up a weight's gradient, and with it the
    stream that it was made on. A backward pass that is captured on another stream would have the
    two wait for one another, which breaks the capture. A leaf of the recording's own has no such
    node.

    Args:
        module: that has the weights.
        weights: of it; a shared one comes once.
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
        decoder: whose parameters are trained, on its device.
        run: its hidden states for a row.
        recorder: makes the recording.
        hooks_take_gradients: whether what a parameter's `.grad` is given is gone before the next
            replay: hooks add it up elsewhere.
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
        """Its hidden states, written over by the next row.

        Args:
            row: of a batch that `takes` takes.

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
        stretch = self._stretch(static, others)
        leaves = [buffer for buffer in static.features().values() if buffer.requires_grad]
        # The gradient of a stretch under autocast is taken outside of it, as the step does.
        with torch.autocast(row.embeds.device.type, enabled=False), torch.enable_grad():
            output = stretch()
            found = torch.autograd.grad(
                output, [*leaves, *others.of.values()], torch.zeros_like(output), allow_unused=True
            )
            reached = zip(weights, found[len(leaves) :], strict=True)
            self._weights = [weight for weight, grad in reached if grad is not None]
            del output, found, reached
            read = (others.of[weight] for weight in self._weights)
            self.recording = self._recorder(stretch, [*leaves, *read])
        self.captures += 1
        return static

    def _stretch(self, static: StaticRow, others: _OtherLeaves) -> Callable[[], Tensor]:
        """The decoder over the buffers, in the dtype of autocast where that is on."""
        kind = static.embeds.device.type
        casts, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def stretch() -> Tensor:
            # A cast weight that autocast keeps would be the first row's for ever.
            cast = torch.autocast(kind, dtype=dtype, enabled=casts, cache_enabled=False)
            with others.put(), cast:
                return self._run(static)

        return stretch

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
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        graph: DecoderGraph = ctx.graph
        assert graph.recording is not None
        if ctx.turn != graph.replays:
            raise RuntimeError("another row went through the captured decoder before this backward")
        found = graph.recording.backward(grads[0])

        def stays(tensor: Tensor) -> bool:
            # What a leaf without a gradient is given becomes its `.grad` as it is, and the next
            # replay would write over it.
            return tensor.is_leaf and tensor.grad is None and not graph.hooks_take_gradients

        return None, *(
            grad.clone() if stays(tensor) else grad.detach()
            for tensor, grad in zip(ctx.wrt, found, strict=True)
        )
