"""Every single-bit flip and every cut at the end of a file, tried on what reads it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vlmpack.errors import VlmpackError

TAIL_BYTES = 2000
SHARE = 0.01
"""Of all flips and cuts, where not all are tried."""


class Noticed:
    """What a reader gives that saw the damage and says so without raising."""


def damaged_copies(good: bytes, *, share: float) -> Iterator[tuple[str, bytes]]:
    """(what was done, bytes): flips of each bit of the last TAIL_BYTES, cuts at each of them.

    Args:
        share: of them, drawn with a fixed seed; the empty file and the last bytes always belong.
    """
    draw = random.Random(len(good))
    first = max(0, len(good) - TAIL_BYTES)
    for place in range(8 * first, 8 * len(good)):
        if draw.random() < share:
            flipped = bytearray(good)
            flipped[place // 8] ^= 1 << place % 8
            yield f"bit {place % 8} of byte {place // 8} of {len(good)} flipped", bytes(flipped)
    for length in {0, len(good) - 1, *range(first, len(good))}:
        if length in (0, len(good) - 1) or draw.random() < share:
            yield f"cut to {length} of {len(good)} bytes", good[:length]


def try_damage(path: Path, read: Callable[[], Any], *, share: float) -> Counter[str]:
    """How often damage was noticed, and how often it was harmless: the same was read.

    Args:
        read: reads the file; raises a VlmpackError or returns Noticed where it sees the damage. It
            may remove or rewrite the file.

    Raises:
        AssertionError: something else was read; any other exception: one that no user should see.
    """
    good, truth = path.read_bytes(), read()
    assert truth is not Noticed and read() == truth, "the whole file is not read as itself"
    found: Counter[str] = Counter()
    for what, damaged in damaged_copies(good, share=share):
        _overwrite(path, damaged)
        try:
            value = read()
        except VlmpackError:
            value = Noticed
        except Exception as error:
            raise RuntimeError(f"{path.name}, {what}: {error!r}") from error
        if value is Noticed:
            found["noticed"] += 1
        else:
            assert value == truth, f"{path.name}, {what}: read as something else"
            found["harmless"] += 1
    _overwrite(path, good)
    assert read() == truth
    return found


def _overwrite(path: Path, data: bytes) -> None:
    """In place: a file that is cut to nothing first is flushed, for milliseconds, when closed."""
    if not path.exists():
        path.touch()
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()
