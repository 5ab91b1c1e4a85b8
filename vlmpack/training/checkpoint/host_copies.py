"""Values of tensors on the host, a piece at a time.

On the CPU pieces are views. From a GPU they are copied on a stream of their own into two buffers of
pinned memory: while the host takes one piece, the next is on its way, and the host waits for each
once, before it reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 1 << 24


class HostCopies:
    """Copies values to the host; for one thread. Its buffers take twice `piece_bytes`, and only
    where there is a value on a GPU.

    Args:
        piece_bytes: the most that a piece has.
    """

    def __init__(self, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._buffers: list[Tensor] = []
        self._streams: dict[torch.device, Any] = {}

    def pieces(self, value: Tensor) -> Iterator[Tensor]:
        """The elements of a tensor in row-major order.

        Args:
            value: on any device, of any strides.

        Yields:
            (n,) on CPU, in the tensor's dtype; to be read before the next one is asked for.
        """
        flat = value.detach().contiguous().view(-1)
        parts = flat.split(max(1, self._piece_bytes // flat.element_size()))
        if not flat.numel():
            return
        if not flat.is_cuda:
            yield from (part.to("cpu") for part in parts)
            return
        stream = self._stream_of(flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))  # which makes the values
        coming = self._begin(parts[0], 0, stream)
        for number in range(len(parts)):
            piece, arrived = coming
            if number + 1 < len(parts):
                coming = self._begin(parts[number + 1], number + 1, stream)
            arrived.synchronize()
            yield piece

    def copy(self, value: Tensor) -> Tensor:
        """A contiguous copy on CPU."""
        copied = torch.empty(value.shape, dtype=value.dtype)
        if not value.is_cuda:
            return copied.copy_(value.detach())
        flat, start = copied.view(-1), 0
        for piece in self.pieces(value):
            flat[start : start + piece.numel()].copy_(piece)
            start += piece.numel()
        return copied

    def _begin(self, part: Tensor, number: int, stream: Any) -> tuple[Tensor, Any]:
        """A piece that is on its way, and the event of its arrival."""
        if not self._buffers:
            self._buffers = [
                torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in "ab"
            ]
        buffer = self._buffers[number % 2].view(part.dtype)[: part.numel()]
        with torch.cuda.stream(stream):
            buffer.copy_(part, non_blocking=True)
        return buffer, stream.record_event()

    def _stream_of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
