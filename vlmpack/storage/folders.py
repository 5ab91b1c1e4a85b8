"""Where vlmpack keeps files of its own on this machine, unless told otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """The index's folder `$VLMPACK_CACHE/index`, or else `~/.cache/vlmpack/index`; other caches lie
    beside it."""
    root = os.environ.get("VLMPACK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "vlmpack") / "index"
