"""Where the tensors of a safetensors file lie: its header, and nothing else, is read.

The format: the header's length (8 bytes, little-endian), a JSON header with dtype, shape and
data_offsets by key, the tensors' little-endian bytes.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from vlmpack.errors import UNREADABLE
from vlmpack.whole_file import open_regular

_MAX_HEADER_BYTES = 100_000_000
"""That of the safetensors format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header has it.

    Args:
        file: that holds it.
        name: in the file.
        dtype: in safetensors' spelling.
        shape: its lengths.
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
        whole: whether the tensors' bytes must be there too: shapes are known without them.

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
        found = [
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
        if whole and any(not 8 + length <= tensor.start <= tensor.stop <= size for tensor in found):
            raise ValueError(f"its {size:,} bytes do not hold all of its tensors")
    except UNREADABLE as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error
    return found
