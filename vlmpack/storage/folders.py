"""Where the data layer keeps files of its own, unless told otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """The folder `$VLMPACK_CACHE/index`, or else `~/.cache/vlmpack/index`."""
    root = os.environ.get("VLMPACK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "vlmpack") / "index"
