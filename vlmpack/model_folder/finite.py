"""Tensors that hold values which are no numbers: NaN, or an infinity.

They are looked for in bytes that are read for a digest anyway. A value is no number where all bits
of its exponent are set. So the largest of the bits, read with and without a sign, is enough to test
all values.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vlmpack.activity import ACTIVITY
from vlmpack.model_folder.safetensors_read import tensors_of
from vlmpack.model_folder.weights import first
from vlmpack.whole_file import open_regular
from vlmpack.words import counted

NonFiniteValues = Mapping[str, AbstractSet[str]]
"""Name of a tensor -> which it holds of `NaN`, `inf` and `-inf`."""

_INFINITY = {
    "F64": (8, 0x7FF0 << 48),
    "F32": (4, 0x7F80 << 16),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E5M2": (1, 0x7C),
    "F8_E4M3": (1, 0x7F),  # which is its NaN: it has no infinity
}
"""Bytes and bits of infinity, in safetensors' spelling; what is larger is NaN."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}

_CHUNK_BYTES = 1 << 20
"""What stays in a core's cache between the two looks."""
_READ_BYTES = 1 << 22


def non_finite_values(data: bytes | memoryview, dtype: str) -> set[str]:
    """Which of `NaN`, `inf` and `-inf` are among values; `NaN` may hide the others.

    Args:
        data: whole values, little-endian.
        dtype: in safetensors' spelling; integers are always numbers.
    """
    size, infinity = _INFINITY.get(dtype, (1, 0))
    kinds: set[str] = set()
    if not infinity:
        return kinds
    values = np.frombuffer(data, f"<u{size}", count=len(data) // size)
    for start in range(0, values.size, _CHUNK_BYTES // size):
        bits = values[start : start + _CHUNK_BYTES // size]
        largest = int(bits.view(f"<i{size}").max()), int(bits.max()) - (1 << 8 * size - 1)
        for value, name in zip(largest, ("inf", "-inf"), strict=True):
            if value >= infinity:
                kinds.add(name if value == infinity and dtype != "F8_E4M3" else "NaN")
    return kinds


def non_finite_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, set[str]]:
    """The tensors that hold values that are no numbers. A sum is finite only if all values are."""
    tensors: dict[str, set[str]] = {}
    for name, tensor in named:
        ACTIVITY.worked()
        value = tensor.detach()
        if value.dtype in _NAMES and not math.isfinite(value.sum()):
            data = value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            if values := non_finite_values(data, _NAMES[value.dtype]):
                tensors[name] = values
    return tensors


def read_through(path: Path) -> tuple[str, dict[str, set[str]]]:
    """The SHA-256 of a file, in hex, and its tensors with values that are no numbers. Of a file
    without a readable header, the SHA-256 alone.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        tensors = sorted(tensors_of(path), key=lambda tensor: tensor.start)
    except ValueError:
        tensors = []
    digest, non_finite = hashlib.sha256(), dict[str, set[str]]()
    with open_regular(path) as file:

        def read(stop: int) -> Iterator[bytes]:
            while data := file.read(max(0, min(_READ_BYTES, stop - file.tell()))):
                digest.update(data)
                yield data

        for tensor in tensors:
            ACTIVITY.worked()
            deque(read(tensor.start), maxlen=0)
            for data in read(tensor.stop):
                if values := non_finite_values(data, tensor.dtype):
                    non_finite.setdefault(tensor.name, set()).update(values)
        deque(read(os.fstat(file.fileno()).st_size), maxlen=0)
    return digest.hexdigest(), non_finite


def non_finite_words(non_finite: NonFiniteValues) -> str:
    """`2 tensors hold values that are no numbers: lm_head.weight (inf), norm.weight (NaN)`."""
    named = first(f"{name} ({', '.join(sorted(non_finite[name]))})" for name in sorted(non_finite))
    hold = "holds" if len(non_finite) == 1 else "hold"
    return f"{counted(len(non_finite), 'tensor')} {hold} values that are no numbers: {named}"
