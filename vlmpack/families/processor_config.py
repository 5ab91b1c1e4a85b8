"""What processor_config.json says beside the image processor: counts and names of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def processor_setting(folder: Path, key: str, default: Any) -> Any:
    """A value of a model folder's processor_config.json.

    Args:
        folder: model folder.
        key: at the top of the file.
        default: of the processor class, for files without it or folders without the file.

    Raises:
        ValueError: the file holds no JSON object.
    """
    path = folder / "processor_config.json"
    if not path.is_file():
        return default
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("processor_config.json holds no JSON object")
    return content.get(key, default)
