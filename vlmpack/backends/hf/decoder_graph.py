"""The decoder of rows of one shape, recorded once and replayed; around it everything is eager.

    tower, merge -> static buffers (embeddings, positions, boundaries, deep features), refilled in
    place -> recorded decoder -> label tokens, head, loss -> gradient of the hidden states
    -> recorded backward pass -> gradients of embeddings, deep features and weights, to autograd

Weights are read where they lie, so an optimizer step needs no new recording. Their gradients leave
the recording as those of any other operator: accumulation, clipping and DDP's hooks see nothing
else, and `.grad` may be None. It costs a second copy of the decoder's trained gradients.

Shapes: T slots of a row, D width, N segments (the same in every row), A position axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.hf.recurrence import ROW_ARGUMENT, packed_row
from vlmpack.backends.recording import Recorder, Recording
from vlmpack.errors import CapabilityError
from vlmpack.packing import Batch, PackedBatch, PackedSeqParams
from vlmpack.packing.row_layout import UnreadLengths
from vlmpack.recurrence import RowSegments

Language = Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor]
"""(T, D) embeddings, (A, 1, T) positions and keyword arguments -> (T, D) hidden states."""


def fixed_arguments(boundaries: Tensor, width: int) -> dict[str, Any]:
    """What tells attention and recurrences where samples end, by the boundaries' tensor alone.

    Args:
        boundaries: (N + 1,) int32, physical.
        width: T, which stands for the longest segment too: kernels take that as a Python number.
    """
    lengths = UnreadLengths(boundaries.shape[0] - 1)
    params = PackedSeqParams(
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=width,
        max_seqlen_kv=width,
        segment_lengths=lengths,
    )
    return {
        "packed_seq_params": params,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": width,
        "max_length_k": width,
        ROW_ARGUMENT: RowSegments(lengths, boundaries, width=width),
    }


class DecoderGraph:
    """Records the decoder at the first training row, and replays it for all others.

    Args:
        decoder: transformers' module, on its device.
        language: calls it.
        recorder: makes the recording.
    """

    def __init__(self, decoder: Any, language: Language, recorder: Recorder) -> None:
        self._decoder, self._language, self._recorder = decoder, language, recorder
        self.captures, self.replays = 0, 0
        self._buffers: dict[str, Tensor] = {}
        self._wrt: list[Tensor] = []
        self.recording: Recording | None = None

    def takes(self, batch: Batch) -> bool:
        """Whether this is a training row of the shape; others run eager."""
        return torch.is_grad_enabled() and isinstance(batch, PackedBatch) and batch.fixed_shape

    def __call__(
        self, batch: Batch, params: PackedSeqParams, embeds: Tensor, deep: Sequence[Tensor]
    ) -> Tensor:
        """(T, D) hidden states, written over by the next row.

        Args:
            batch: which `takes` takes.
            params: its boundaries.
            embeds: (T, D), merged.
            deep: (T, D) for each of the first layers.

        Raises:
            CapabilityError: the row has another shape than the one that was recorded.
        """
        given = {
            "embeddings": embeds,
            "positions": batch.position_ids,
            "boundaries": params.cu_seqlens_physical,
        }
        for number, layer in enumerate(deep):
            given[f"deep features {number}"] = layer
        if self.recording is None:
            self._record(given)
        self._refill(given)
        leaves = [tensor for name, tensor in given.items() if self._buffers[name].requires_grad]
        weights = self._wrt[len(leaves) :]
        self.replays += 1
        output: Tensor = _Replayed.apply(self, *leaves, *weights)  # type: ignore[no-untyped-call]
        return output

    def _record(self, given: Mapping[str, Tensor]) -> None:
        """Make the buffers and the recording, by what the first row has."""
        trained = any(tensor.requires_grad for tensor in given.values())
        for name, tensor in given.items():
            buffer = tensor.detach().clone(memory_format=torch.contiguous_format)
            # Deep features of a row without images ask for no gradient, those of others do.
            self._buffers[name] = buffer.requires_grad_(trained and tensor.is_floating_point())
        stretch = self._stretch(embeds := self._buffers["embeddings"])
        leaves = [buffer for buffer in self._buffers.values() if buffer.requires_grad]
        weights = [weight for weight in self._decoder.parameters() if weight.requires_grad]
        # The gradient of a stretch under autocast is taken outside of it, as the step does.
        with torch.autocast(embeds.device.type, enabled=False), torch.enable_grad():
            output = stretch()
            found = torch.autograd.grad(
                output, [*leaves, *weights], torch.zeros_like(output), allow_unused=True
            )
            reached = zip(weights, found[len(leaves) :], strict=True)
            self._wrt = [*leaves, *(weight for weight, grad in reached if grad is not None)]
            del output, found, reached
            self.recording = self._recorder(stretch, self._wrt)
        self.captures += 1

    def _stretch(self, embeds: Tensor) -> Callable[[], Tensor]:
        """The decoder over the buffers, in the dtype of autocast where that is on."""
        buffers, kind = self._buffers, embeds.device.type
        deep = [buffer for name, buffer in buffers.items() if name.startswith("deep")]
        casts, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def stretch() -> Tensor:
            arguments = fixed_arguments(buffers["boundaries"], embeds.shape[0])
            if deep:
                arguments["deepstack_visual_embeds"] = deep
            # A cast weight that autocast keeps would be the first row's for ever.
            cast = torch.autocast(kind, dtype=dtype, enabled=casts, cache_enabled=False)
            with cast, packed_row():
                return self._language(embeds, buffers["positions"], arguments)

        return stretch

    def _refill(self, given: Mapping[str, Tensor]) -> None:
        """Write a row into the buffers."""
        shown = {name: (tuple(t.shape), t.dtype) for name, t in given.items()}
        held = {name: (tuple(t.shape), t.dtype) for name, t in self._buffers.items()}
        if shown != held:
            name = next(n for n in (*held, *shown) if shown.get(n) != held.get(n))
            raise CapabilityError(
                f"the captured decoder has {name} of (shape, dtype) {held.get(name)}, the "
                f"row has {shown.get(name)}; set training.cuda_graphs: none"
            )
        for name, tensor in given.items():
            if tensor.requires_grad and not self._buffers[name].requires_grad:
                raise CapabilityError(f"the captured decoder gives {name} no gradient, and has to")
        with torch.no_grad():
            for name, tensor in given.items():
                self._buffers[name].copy_(tensor, non_blocking=True)


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
        # What a leaf without a gradient is given becomes its `.grad` as it is, and the next replay
        # would write over it.
        return None, *(
            grad.clone() if tensor.is_leaf and tensor.grad is None else grad.detach()
            for tensor, grad in zip(ctx.wrt, found, strict=True)
        )
