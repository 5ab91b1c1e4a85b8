"""A transformers model without storage: names, shapes, classes, config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vlmpack.errors import ModelError


def model_skeleton(auto_class: Any, folder: Path) -> Any:
    """The model of a folder on the meta device; no weight is read.

    Raises:
        ModelError: config.json is none that transformers can build.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with torch.device("meta"):
            return auto_class.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: {folder} cannot be built: {error}") from error
