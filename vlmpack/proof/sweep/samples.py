"""A shard of eight conversations with no image, one, two and three, of many sizes."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path

from PIL.Image import frombytes

COUNTS = (2, 0, 1, 3, 0, 1, 2, 1)
"""Images of each sample."""

SIDES = (32, 140)
"""Least and largest side of an image in pixels."""


def write_shard(path: Path, *, images: bool, seed: int = 0) -> None:
    """The samples, in their order.

    Args:
        images: whether there are any.
    """
    draw = random.Random(seed)
    with tarfile.open(path, "w") as tar:
        for number, count in enumerate(COUNTS):
            parts: list[dict[str, str]] = []
            for place in range(count if images else 0):
                name = f"{place}.png"
                _add(tar, f"{number:06d}.{name}", _picture(draw))
                parts.append({"type": "image", "image": name})
                parts.append({"type": "text", "text": _words(draw, 1 + place)})
            parts.append({"type": "text", "text": _words(draw, draw.randint(1, 9))})
            messages = [
                {"role": "user", "content": parts},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": _words(draw, draw.randint(1, 5))}],
                },
            ]
            _add(tar, f"{number:06d}.json", json.dumps({"messages": messages}).encode())


def _words(draw: random.Random, count: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=draw.randint(2, 6))) for _ in range(count))


def _picture(draw: random.Random) -> bytes:
    width, height = (draw.randint(*SIDES) for _ in range(2))
    out = io.BytesIO()
    frombytes("RGB", (width, height), draw.randbytes(3 * width * height)).save(out, format="PNG")
    return out.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
