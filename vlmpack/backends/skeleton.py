"""A transformers model without storage: names, shapes, classes, config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vlmpack.backends.hf.load import deferred_model
from vlmpack.backends.ties import record_ties, write_ties
from vlmpack.errors import ModelError, as_model_error
from vlmpack.families.registry import family_of
from vlmpack.model_folder.load import build_model, buildable, load_config
from vlmpack.model_folder.weights import stored_tensors, weight_files


def model_skeleton(auto_class: Any, folder: Path) -> Any:
    """The model of a folder on the meta device. The only weights read are head and embedding, to
    see whether they differ.

    Raises:
        ModelError: config.json is none that transformers can build.
    """
    failed = as_model_error(f"model.path: {folder} cannot be built", OSError, ValueError, KeyError)
    with failed, buildable(folder):
        config = load_config(folder)
        model = _without_storage(auto_class, config)
        if _has_own_head(folder, model):
            write_ties(config, tied=False)
            model = _without_storage(auto_class, config)
    record_ties(model)
    return model


def folder_skeleton(folder: Path) -> Any:
    """The model of a folder's own class. Raises as `model_skeleton`, and CapabilityError."""
    return model_skeleton(family_of(folder).auto_class(), folder)


def _without_storage(auto_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return build_model(auto_class, config)


def _has_own_head(folder: Path, model: Any) -> bool:
    """Whether a head that config.json ties lies in the files with other values; see `ties`."""
    ends = tuple(_end(name) for name in getattr(model, "all_tied_weights_keys", {}))
    try:
        names = [tensor.name for path in weight_files(folder) for tensor in stored_tensors(path)]
        if not any(_end(name) in ends for name in names):
            return False
        return not deferred_model(folder).config.tie_word_embeddings
    except (ModelError, NotImplementedError, RuntimeError):
        return False  # loading it raises the error


def _end(name: str) -> str:
    """`lm_head.weight`: files have other names before it."""
    return ".".join(name.split(".")[-2:])
