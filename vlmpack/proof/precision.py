"""float32 means float32 while something is proven."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import backends


@contextmanager
def full_float32() -> Iterator[None]:
    """float32 matmuls and convolutions without TF32 or bfloat16 inside; afterwards as they were.

    torch lets cuDNN's convolutions use TF32 unless told otherwise: a vision tower's patches then
    differ by the number of images beside them, by more than packing may change. There are two ways
    to tell it, and what the newer has set cannot always be read by the older.
    """
    gpu: Any = backends.cudnn  # whose operations torch's own types do not know
    cpu: Any = backends.mkldnn
    operations: tuple[Any, ...] = (backends.cuda.matmul, gpu.conv, gpu.rnn)
    operations += (cpu.matmul, cpu.conv, cpu.rnn)
    precisions = [operation.fp32_precision for operation in operations]
    try:
        older = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:
        older = None
    else:  # or who asks by the older way inside is refused
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
    for operation in operations:
        operation.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            backends.cudnn.allow_tf32 = older[1]
        for operation, precision in zip(operations, precisions, strict=True):
            operation.fp32_precision = precision
