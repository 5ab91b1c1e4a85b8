"""What models are called on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_name(text: str) -> bool:
    """Whether it is OWNER/NAME."""
    return _NAME.fullmatch(text) is not None


def hub_name_of(folder: Path) -> str | None:
    """OWNER/NAME of a folder in huggingface_hub's cache, `models--OWNER--NAME/snapshots/REVISION`;
    None for any other."""
    snapshots = folder.absolute().parent
    kind, *parts = snapshots.parent.name.split("--")
    if snapshots.name != "snapshots" or kind != "models" or len(parts) != 2:
        return None
    return "/".join(parts)
