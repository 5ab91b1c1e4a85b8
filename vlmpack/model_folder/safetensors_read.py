"""Where the tensors of a safetensors file lie, and a box of one, a few megabytes at a time.

The safetensors library maps files into memory, which counts as the process's own. Here a box needs
only one chunk besides its target.

The format: the header's length (8 bytes, little-endian), a JSON header with dtype, shape and
data_offsets by key, the tensors' little-endian bytes.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vlmpack.errors import UNREADABLE
from vlmpack.whole_file import open_regular

_MAX_HEADER_BYTES = 100_000_000
"""That of the safetensors format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header has it.

    Args:
        dtype: in safetensors' spelling.
        start, stop: its bytes in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def tensors_of(path: Path, *, whole: bool = True) -> list[StoredTensor]:
    """What a safetensors file holds.

    Args:
        whole: whether the tensors' bytes must be there too; shapes are known without them.

    Raises:
        ValueError: it is damaged, cut off, no such file, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        tensors = [
            StoredTensor(
                path,
                name,
                str(said["dtype"]),
                tuple(int(n) for n in said["shape"]),
                *(8 + length + int(offset) for offset in said["data_offsets"]),
            )
            for name, said in header.items()
            if name != "__metadata__"
        ]
        if whole and any(
            not 8 + length <= tensor.start <= tensor.stop <= size for tensor in tensors
        ):
            raise ValueError(f"its {size:,} bytes do not hold all of its tensors")
    except UNREADABLE as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error
    return tensors


CHUNK_BYTES = 1 << 22
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
READABLE = DTYPES | {"I32": torch.int32, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
"""With those of codes, which quantised weights are made of."""


def read_into(target: Tensor, stored: StoredTensor, index: tuple[slice, ...]) -> None:
    """Copy a box of a tensor. Rows are read whole, a few megabytes at a time, and cut in memory.

    Args:
        target: on CPU, any strides and dtype; has the shape of the box.
        index: a slice with start and stop for each dimension.

    Raises:
        OSError: the file cannot be read, or ends early.
        ValueError: its header gives the tensor another number of bytes than its shape has.
    """
    dtype = READABLE[stored.dtype]
    if stored.stop - stored.start != math.prod(stored.shape) * dtype.itemsize:
        raise ValueError(f"{stored.file} has a bad safetensors header: {stored}")
    # A scalar is a tensor with one row.
    shape, index = (stored.shape, index) if stored.shape else ((1,), (slice(0, 1),))
    target = target.reshape(1) if target.ndim == 0 else target
    if target.numel() == 0:
        return
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    first, last = index[0].start, index[0].stop
    rows = max(1, CHUNK_BYTES // row_bytes)
    with open_regular(stored.file) as file:
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            num_bytes = (stop - start) * row_bytes
            data = bytearray(num_bytes)
            file.seek(stored.start + start * row_bytes)
            view = memoryview(data)
            while view:  # one read may return less than it was asked for
                count = file.readinto(view)
                if not count:
                    raise OSError(f"{stored.file} ends early")
                view = view[count:]
            block = torch.frombuffer(data, dtype=dtype).view(-1, *shape[1:])
            target[start - first : stop - first].copy_(block[(slice(None), *index[1:])])
