"""A model folder -> a transformers model on CPU, in float32, with every weight accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vlmpack.backends.hf.headers import raise_misfits, weight_files
from vlmpack.errors import ModelError
from vlmpack.families import family_of


def load_model(folder: Path) -> Any:
    """Load a pretrained model; master weights are float32 whatever the file's dtype.

    Raises:
        ModelError: no weights in the folder, a weight that is missing, left over or of the wrong
            shape, or a damaged file.
        CapabilityError: no family serves its model_type.
    """
    weight_files(folder)
    from safetensors import SafetensorError

    try:
        loaded: Any = (
            family_of(folder)
            .auto_class()
            .from_pretrained(
                str(folder),
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name and shapes
            )
        )
        model, info = loaded
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model.path: {folder} cannot be loaded: {error}") from error
    raise_misfits(folder, info)
    return model
