"""Safetensors files of headers alone: who reads names and shapes reads no weight."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path


def write_headers(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """One file of tensors in bfloat16 that takes a few bytes."""
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
            for name, shape in shapes.items()
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
