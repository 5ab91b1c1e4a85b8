"""What the sweep found of every class of transformers that registers for images and text, or for
text alone: written by `make families-sweep`, with transformers 5.23.0.

served   a family of ours; proven   the generic family trains it; refused   and why
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlmpack.capabilities.registered import Kind

Word = Literal["served", "proven", "refused"]


@dataclass(frozen=True, slots=True)
class Swept:
    """What can be done with a class.

    Args:
        word: one of three.
        reason: the fact that is missing, where it is refused.
    """

    word: Word
    reason: str = ""


def _table(name: str) -> Mapping[str, Swept]:
    content = json.loads(Path(__file__).with_name(name).read_text(encoding="ascii"))
    return {model_type: Swept(**word) for model_type, word in content.items()}


FILES: Mapping[Kind, str] = {"image-text-to-text": "swept.json", "text": "swept_text.json"}
"""Where the words of each kind of class stand, beside this module."""

IMAGES: Mapping[str, Swept] = _table(FILES["image-text-to-text"])
"""Classes with images, by model_type."""

TEXT: Mapping[str, Swept] = _table(FILES["text"])
"""Language models alone, by model_type."""

SWEPT: Mapping[str, Swept] = {**TEXT, **IMAGES}
"""The words of both."""
