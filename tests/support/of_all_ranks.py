"""What each rank of a test found, in one file for the process that started them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmpack.distributed import Ranks


def write_of_all_ranks(found: Any, path: Path, ranks: Ranks) -> None:
    """A JSON list, by rank; every rank calls it."""
    everywhere = ranks.gather_objects(found)
    if ranks.is_main:
        path.write_text(json.dumps(everywhere), encoding="utf-8")
