"""A model folder -> a transformers model on CPU, in float32, with every weight accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of
from vlmpack.model_folder.load import load_model_class
from vlmpack.model_folder.weights import raise_misfits, weight_files


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
        model, info = load_model_class(family_of(folder).auto_class(), folder)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model.path: {folder} cannot be loaded: {error}") from error
    raise_misfits(folder, info)
    return model
