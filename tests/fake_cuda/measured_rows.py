"""Rows of `benchmarks/gpu_row.py` on the fake GPU: `python -m fake_cuda.measured_rows REQUESTS`."""

from __future__ import annotations

import json
import sys
import warnings
from unittest.mock import patch

import gpu_row
import torch
from accelerate.state import AcceleratorState
from fake_cuda.device import fake_gpu
from gpu_row import Kernel

SMALL = (
    Kernel("product", "products", (64, 32, 16)),
    Kernel("addition", "bytes", (64, 64)),
    Kernel("attention", "attention", (128, 64, 2, 16), True),
)


def main() -> None:
    """Answer with a JSON object for each row. Memory is none here."""
    warnings.simplefilter("ignore")
    found = []
    with (
        fake_gpu(),
        patch.object(torch.cuda, "reset_peak_memory_stats", lambda _: None),
        patch.object(torch.cuda, "max_memory_allocated", lambda _: 1),
        patch.object(gpu_row, "STEPS", 1),
        patch.object(gpu_row, "KERNELS", SMALL),
    ):
        for given in json.loads(sys.argv[1]):
            kind = given.pop("kind")
            found.append(gpu_row.KINDS[kind](**given, fake=False))
            AcceleratorState._reset_state(True)  # a process has one
    print(json.dumps(found))


if __name__ == "__main__":
    main()
