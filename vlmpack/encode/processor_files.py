"""A pixel budget written into a model folder, so that inference resizes images as training did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpack.families.base import PixelBudget

if TYPE_CHECKING:
    from vlmpack.encode.encoder import Encoder

_FILES = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
"""Where transformers looks for an image processor: a file, or a section of one."""


def write_budget(encoder: Encoder, folder: Path) -> None:
    """Put the encoder's bounds into the processor files of an exported folder.

    Without a budget the files stay as they are, byte for byte.

    Args:
        encoder: what the model was trained with.
        folder: a copy of its model folder.
    """
    if encoder.budget == PixelBudget():
        return
    settings = encoder.image_rule.settings()
    for name, section in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if section is not None and section not in content:
            continue
        (content if section is None else content[section]).update(settings)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
