"""A model folder -> a transformers model on CPU, in float32, with every weight accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vlmpack.errors import ModelError
from vlmpack.families import family_of


def load_model(folder: Path) -> Any:
    """Load a pretrained model; master weights are float32 whatever the file's dtype.

    Raises:
        ModelError: no weights in the folder, a weight that is missing, left over or of the wrong
            shape, or a damaged file.
        CapabilityError: no family serves its model_type.
    """
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model.path: {folder} has no weights; expected model.safetensors or "
            f"model-00001-of-*.safetensors beside config.json"
        )
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
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(map(str, sorted(info[kind])[:5]))}"
        f"{' ...' if len(info[kind]) > 5 else ''}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    ]
    if problems:
        raise ModelError(
            f"model.path: the weights in {folder} do not fit its config.json "
            f"({'; '.join(problems)})"
        )
    return model
