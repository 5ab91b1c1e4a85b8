"""A model folder and adapters -> a model folder with the adapters inside of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vlmpack.capabilities.folder import read_config
from vlmpack.distributed import Ranks
from vlmpack.errors import VlmpackError, writing
from vlmpack.run.result import export_dtype, publish_folder


def merge_folders(model: Path, adapters: Sequence[Path], out: Path, *, dtype: str) -> torch.dtype:
    """Merge one adapter folder after the other, in float32, and write what comes of it.

    Args:
        model: folder in transformers format, whose weights the first adapters are beside.
        adapters: in peft's format; each was trained on the model with those before it merged.
        out: folder to write, which must not be there yet.
        dtype: of the written weights, as the recipe's `export.dtype`.

    Returns:
        The dtype.

    Raises:
        VlmpackError: a place that is taken or cannot be written.
        ModelError: a folder that cannot be read, or adapters of another model.
    """
    from vlmpack.backends.export import save_model_folder
    from vlmpack.backends.hf.load import load_model
    from vlmpack.backends.hf.merge import merge_adapter

    if out.exists():
        raise VlmpackError(f"{out} is there already; choose another place with -o, or delete it")
    read_config(model)
    merged = load_model(model)
    for folder in adapters:
        merged = merge_adapter(merged, folder)
    chosen = export_dtype(dtype, model)

    def write(folder: Path) -> None:
        save_model_folder(
            merged, dict(merged.state_dict()), folder, processor_from=model, dtype=chosen
        )

    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        publish_folder(out, Ranks(), write, replace=False)
    return chosen
