"""What the sweep found of every class of transformers that registers for images and text, or for
text alone: written by `make families-sweep`, with transformers 5.23.0.

served   a family of ours; proven   the generic family trains it; refused   and why
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


SWEPT: Mapping[str, Swept] = {}
"""By model_type, in the order of transformers."""
