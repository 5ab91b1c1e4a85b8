"""Whether a folder's weights fit its config.json, from the headers of the files: nothing is read.

transformers itself loads tensors without values (on the meta device), so names that are changed on
load, tied weights and experts that are fused are judged by what will really load them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of
from vlmpack.model_folder.load import load_shapes
from vlmpack.model_folder.weights import raise_misfits, weight_files


def check_weights(folder: Path) -> None:
    """Raise unless loading the folder will find every weight, in its shape, and no others.

    Raises:
        ModelError: no weights, a damaged or missing file, a weight that is missing, left over or
            of the wrong shape.
        CapabilityError: no family serves its model_type.
    """
    state = {name: tensor for path in weight_files(folder) for name, tensor in _headers(path)}
    auto_class = family_of(folder).auto_class()
    try:
        with _quiet():
            info = load_shapes(auto_class, folder, state)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: {folder} cannot be loaded: {error}") from error
    except (NotImplementedError, RuntimeError):
        return  # a conversion that needs values; the load itself will tell
    raise_misfits(folder, info)


def _headers(path: Path) -> list[tuple[str, Tensor]]:
    """Names and shapes, as tensors without values.

    Raises:
        ModelError: the file is damaged, cut off, or no safetensors file.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            return [
                (name, torch.empty(file.get_slice(name).get_shape(), device="meta"))
                for name in file.keys()  # noqa: SIM118
            ]
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"model.path: {path} is damaged or cut off ({path.stat().st_size:,} bytes): {error}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bar, and its report that missing weights were made up."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
