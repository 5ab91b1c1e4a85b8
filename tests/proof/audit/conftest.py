"""Windows small enough that the epochs of a small split have several."""

from __future__ import annotations

from support.shard_fakes import small_windows

__all__ = ["small_windows"]
