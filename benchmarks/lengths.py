"""The tests' mix of text and images, as benchmarks measure on it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from support.lengths import mixed_lengths  # noqa: E402

__all__ = ["mixed_lengths"]
