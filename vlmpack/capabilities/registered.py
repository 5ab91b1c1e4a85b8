"""Which classes the installed transformers registers, read in its sources without importing it.

A recipe is checked where torch is not imported, and importing transformers takes seconds.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Kind = Literal["image-text-to-text", "text"]

_MAPPINGS: dict[Kind, str] = {
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "text": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
}

_FILE = Path("models/auto/modeling_auto.py")


@cache
def registered(kind: Kind) -> frozenset[str]:
    """Values of `model_type` with a class of that kind; empty where transformers is not found.

    Args:
        kind: a vision-language model, or a language model alone.
    """
    found = find_spec("transformers")
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    for folder in folders:
        path = Path(folder) / _FILE
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            block = re.search(rf"^{_MAPPINGS[kind]} = OrderedDict\((.*?)^\)", text, re.M | re.S)
            names = re.findall(r'^\s+\("([^"]+)", ', block[1], re.M) if block else []
            return frozenset(names)
    return frozenset()


def kind_of(model_type: str) -> Kind | None:
    """What transformers registers a model_type as; None where it does not."""
    return next((kind for kind in _MAPPINGS if model_type in registered(kind)), None)
