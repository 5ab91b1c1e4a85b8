"""Safetensors files, written and read one tensor at a time.

The format: the header's length (8 bytes, little-endian), a JSON header with dtype, shape and
data_offsets by key, the tensors' little-endian bytes without gaps. The safetensors library writes
from a dictionary of all tensors, and maps what it reads into memory, where it counts as the
process's own; here both need one tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from vlmpack.errors import UNREADABLE

CHUNK_BYTES = 1 << 22
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file.

    Args:
        key: its name in the file.
        dtype: in safetensors' spelling.
        shape: of what the file holds.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """What a manifest says about a file.

    Args:
        num_bytes: its size.
        sha256: of its content, in hex.
    """

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
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self._left = list(reversed(entries))
        self._digest = hashlib.sha256()
        self._num_bytes = 0
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
        """Write the next tensor; on a device or strided, it is copied to the host first.

        Raises:
            ValueError: it is not the one that the header names next.
            OSError: disk full, and the like.
        """
        entry = TensorEntry(key=key, dtype=dtype_name(value.dtype), shape=tuple(value.shape))
        if not self._left or self._left.pop() != entry:
            raise ValueError(f"{entry} is not what the header of {self._file.name} says")
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        data: memoryview = flat.view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            self._put(data[start : start + CHUNK_BYTES])

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

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class TensorFile:
    """A safetensors file, open for reading.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        try:
            self._entries = self._read_header(path)
        except BaseException:
            self._file.close()
            raise

    def _read_header(self, path: Path) -> dict[str, tuple[TensorEntry, int]]:
        size = path.stat().st_size
        length = int.from_bytes(self._file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} has no safetensors header")
        try:
            header = json.loads(self._file.read(length))
            found: dict[str, tuple[TensorEntry, int]] = {}
            for key, said in header.items():
                if key == "__metadata__":
                    continue
                shape = tuple(map(int, said["shape"]))
                entry = TensorEntry(key=key, dtype=str(said["dtype"]), shape=shape)
                start, stop = map(int, said["data_offsets"])
                if stop - start != entry.num_bytes or not 0 <= start <= stop <= size - 8 - length:
                    raise ValueError(f"bytes {start} to {stop} are not those of {entry}")
                found[key] = entry, 8 + length + start
        except UNREADABLE as error:
            raise ValueError(f"{path} has a bad safetensors header: {error}") from error
        return found

    def entries(self) -> list[TensorEntry]:
        """Every tensor of the file."""
        return [entry for entry, _ in self._entries.values()]

    def entry(self, key: str) -> TensorEntry:
        """Dtype and shape of a tensor; KeyError where there is none."""
        return self._entries[key][0]

    def read_into(self, target: Tensor, key: str, index: tuple[slice, ...]) -> None:
        """Copy a box of a tensor.

        Rows are read whole, a few megabytes at a time, and cut in memory.

        Args:
            target: on CPU, any strides; has the shape of the box and the tensor's dtype.
            key: the tensor.
            index: a slice with start and stop for each dimension.

        Raises:
            OSError: the file cannot be read, or ends early.
        """
        entry, offset = self._entries[key]
        # A scalar is a tensor with one row.
        shape, index = (entry.shape, index) if entry.shape else ((1,), (slice(0, 1),))
        target = target.reshape(1) if target.ndim == 0 else target
        row_bytes = math.prod(shape[1:]) * DTYPES[entry.dtype].itemsize
        if target.numel() == 0:
            return
        first, last = index[0].start, index[0].stop
        rows = max(1, CHUNK_BYTES // row_bytes)
        buffer = bytearray(min(rows, last - first) * row_bytes)
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            view = memoryview(buffer)[: (stop - start) * row_bytes]
            self._fill(view, offset + start * row_bytes)
            block = torch.frombuffer(view, dtype=DTYPES[entry.dtype]).view(-1, *shape[1:])
            target[start - first : stop - first].copy_(block[(slice(None), *index[1:])])

    def _fill(self, view: memoryview, offset: int) -> None:
        self._file.seek(offset)
        while view:
            count = self._file.readinto(view)
            if not count:
                raise OSError(f"{self._file.name} ends early")
            view = view[count:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """Write a file of a few tensors that are at hand."""
    entries = [
        TensorEntry(key=key, dtype=dtype_name(value.dtype), shape=tuple(value.shape))
        for key, value in tensors.items()
    ]
    with TensorWriter(path, entries) as writer:
        for key, value in tensors.items():
            writer.write(key, value)
        return writer.finish()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a small file; raises as `TensorFile`."""
    with TensorFile(path) as file:
        tensors: dict[str, Tensor] = {}
        for entry in file.entries():
            value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            file.read_into(value, entry.key, tuple(slice(0, length) for length in entry.shape))
            tensors[entry.key] = value
        return tensors
