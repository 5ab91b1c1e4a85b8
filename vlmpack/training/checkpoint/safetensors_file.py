"""Safetensors files, written one tensor at a time; the library needs a dictionary of all.

Values come to the host in pieces. On the CPU pieces are views. From a GPU they are copied on their
own stream into two pinned buffers, so that one piece is copied while the host uses the other.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.model_folder.finite import non_finite_values
from vlmpack.model_folder.safetensors_read import CHUNK_BYTES, DTYPES, read_into, tensors_of

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
        coming = self._start_copy(parts[0], 0, stream)
        for number in range(len(parts)):
            piece, arrived = coming
            if number + 1 < len(parts):
                coming = self._start_copy(parts[number + 1], number + 1, stream)
            arrived.synchronize()
            yield piece

    def copy(self, value: Tensor) -> Tensor:
        copied = torch.empty(value.shape, dtype=value.dtype)
        if not value.is_cuda:
            return copied.copy_(value.detach())
        flat, start = copied.view(-1), 0
        for piece in self.pieces(value):
            flat[start : start + piece.numel()].copy_(piece)
            start += piece.numel()
        return copied

    def _start_copy(self, part: Tensor, number: int, stream: Any) -> tuple[Tensor, Any]:
        """Start copying a piece; returns it with the event of its arrival."""
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


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file.

    Args:
        dtype: in safetensors' spelling.
        shape: of what the file holds.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """What a manifest says about a file."""

    num_bytes: int
    sha256: str


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' spelling.

    Raises:
        TypeError: a dtype that checkpoints do not hold.
    """
    if dtype not in _NAMES:
        raise TypeError(f"{dtype} is no dtype of a checkpoint; expected one of {list(_NAMES)}")
    return _NAMES[dtype]


class TensorWriter:
    """Writes a safetensors file front to back, and hashes it on the way.

    Args:
        path: must not exist.
        entries: what will be written, in this order.
        copies: of values on a GPU to the host, shared with other writers of the same thread.
    """

    def __init__(
        self, path: Path, entries: Sequence[TensorEntry], copies: HostCopies | None = None
    ) -> None:
        self._copies = HostCopies(piece_bytes=CHUNK_BYTES) if copies is None else copies
        self._left = list(reversed(entries))
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        self.non_finite: dict[str, set[str]] = {}
        """What was written of values that are no numbers; see `non_finite_values`."""
        self._file = path.open("xb")
        header: dict[str, Any] = {}
        stop = 0
        for entry in entries:
            start, stop = stop, stop + entry.num_bytes
            header[entry.key] = {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "data_offsets": (start, stop),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned
        try:
            self._put(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self._file.close()
            raise

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._num_bytes += len(data)

    def write(self, key: str, value: Tensor) -> None:
        """Write the next tensor; from a GPU it is copied to the host piece by piece.

        Raises:
            ValueError: it is not the one that the header names next.
            OSError: disk full, and the like.
        """
        entry = TensorEntry(key=key, dtype=dtype_name(value.dtype), shape=tuple(value.shape))
        if not self._left or self._left.pop() != entry:
            raise ValueError(f"{entry} is not what the header of {self._file.name} says")
        for piece in self._copies.pieces(value):
            data = piece.view(torch.uint8).numpy().data
            self._put(data)
            if kinds := non_finite_values(data, entry.dtype):
                self.non_finite.setdefault(key, set()).update(kinds)

    def finish(self) -> FileDigest:
        """Flush to the disk; size and hash of what was written.

        Raises:
            ValueError: the header names more tensors than were written.
            OSError: disk full, and the like.
        """
        if self._left:
            raise ValueError(f"{self._file.name} lacks {self._left[-1]}")
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileDigest(num_bytes=self._num_bytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    entries = [
        TensorEntry(key=key, dtype=dtype_name(value.dtype), shape=tuple(value.shape))
        for key, value in tensors.items()
    ]
    with closing(TensorWriter(path, entries)) as writer:
        for key, value in tensors.items():
            writer.write(key, value)
        return writer.finish()


def read_tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for stored in tensors_of(path):
        tensors[stored.name] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        whole = tuple(slice(0, length) for length in stored.shape)
        read_into(tensors[stored.name], stored, whole)
    return tensors
