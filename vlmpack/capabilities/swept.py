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


def _table() -> Mapping[str, Swept]:
    content = json.loads(Path(__file__).with_name("swept.json").read_text(encoding="ascii"))
    return {name: Swept(**word) for name, word in content.items()}


SWEPT: Mapping[str, Swept] = _table()
"""By model_type, as swept.json has them."""
