"""peft's own reading of adapter folders: the reference for ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from vlmpack.families.registry import family_of


def peft_model(folder: Path, adapter: Path) -> Any:
    """A model folder in float32 with the adapters of another one beside it."""
    from peft import PeftModel

    auto = family_of(folder).auto_class()
    base = auto.from_pretrained(str(folder), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
        return PeftModel.from_pretrained(base, str(adapter)).eval()
