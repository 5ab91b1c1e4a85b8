"""Safetensors files, written one tensor at a time: the safetensors library writes from a dictionary
of all tensors."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.model_folder.finite import odd_values
from vlmpack.model_folder.safetensors_read import CHUNK_BYTES, DTYPES, read_into, tensors_of
from vlmpack.training.checkpoint.host_copies import HostCopies

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
        copies: of values on a GPU to the host, shared with other writers of the same thread.
    """

    def __init__(
        self, path: Path, entries: Sequence[TensorEntry], copies: HostCopies | None = None
    ) -> None:
        self._copies = HostCopies(piece_bytes=CHUNK_BYTES) if copies is None else copies
        self._left = list(reversed(entries))
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        self.odd: dict[str, set[str]] = {}
        """What was written of values that are no numbers; see `odd_values`."""
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
            if odd := odd_values(data, entry.dtype):
                self.odd.setdefault(key, set()).update(odd)

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
        """Close the file, finished or not."""
        self._file.close()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """Write a file of a few tensors that are at hand."""
    entries = [
        TensorEntry(key=key, dtype=dtype_name(value.dtype), shape=tuple(value.shape))
        for key, value in tensors.items()
    ]
    with closing(TensorWriter(path, entries)) as writer:
        for key, value in tensors.items():
            writer.write(key, value)
        return writer.finish()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a small file; raises as `tensors_of` and `read_into`."""
    tensors: dict[str, Tensor] = {}
    for stored in tensors_of(path):
        tensors[stored.name] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        whole = tuple(slice(0, length) for length in stored.shape)
        read_into(tensors[stored.name], stored, whole)
    return tensors
