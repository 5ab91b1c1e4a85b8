"""Whether a model fits: the reference with its gradients, then the engine with AdamW's moments."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from vlmpack.errors import CapabilityError
from vlmpack.training.plan.parameters import read_shapes

BYTES_PER_PARAMETER = 16
"""Of the larger of the two, which are never held together: the engine's float32 weights, gradients
and both moments. The reference has weights and gradients alone."""

KEPT_BYTES_PER_PARAMETER = 4
"""The reference's gradients wait in host memory."""


def require_memory(folder: Path, device: torch.device, *, split: int = 1) -> None:
    """Refuse a model that does not fit, before any weight is read.

    Args:
        folder: model folder.
        device: where it would compute.
        split: processes that share one engine's weights.

    Raises:
        CapabilityError: with both numbers, and what to do.
    """
    parameters = sum(
        math.prod(shape)
        for path in folder.glob("*.safetensors")
        for shape in read_shapes(path).values()
    )
    engine = max(BYTES_PER_PARAMETER // split, 8)
    free: int | None
    if device.type == "cuda":
        free, needed = torch.cuda.mem_get_info(device)[0], engine * parameters
    else:
        free, needed = available_bytes(), (engine + KEPT_BYTES_PER_PARAMETER) * parameters
    if free is not None and needed > free:
        raise CapabilityError(
            f"verify compares {parameters:,} parameters in float32, which takes about "
            f"{_gib(needed)} beside activations; {device} has {_gib(free)} free. "
            f"`vlmpack verify --tiny` takes a model of the same architecture with a few layers and "
            f"random weights, on the same samples"
        )


def available_bytes() -> int | None:
    """Bytes that Linux can hand out; None elsewhere."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
