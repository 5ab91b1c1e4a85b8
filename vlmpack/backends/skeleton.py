"""A transformers model without storage: names, shapes, classes, config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vlmpack.errors import ModelError
from vlmpack.model_folder.load import build_model, load_config


def model_skeleton(auto_class: Any, folder: Path) -> Any:
    """The model of a folder on the meta device; no weight is read.

    Raises:
        ModelError: config.json is none that transformers can build.
    """
    try:
        config = load_config(folder)
        with torch.device("meta"):
            return build_model(auto_class, config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: {folder} cannot be built: {error}") from error
