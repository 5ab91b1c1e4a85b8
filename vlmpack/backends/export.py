"""Writing a folder that transformers' `from_pretrained` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.model_folder.content import PROCESSOR_FILES


def save_model_folder(
    model: Any,
    state: dict[str, Tensor],
    folder: Path,
    *,
    processor_from: Path,
    dtype: torch.dtype | None,
) -> None:
    """Write config, weights and processor files. Called on one rank.

    Args:
        model: the transformers model; its own weights are not read.
        state: whole tensors under transformers' names.
        folder: where to.
        processor_from: folder with the processor's files.
        dtype: of the saved weights; None to keep that of `state`.
    """
    if dtype is not None:
        state = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in state.items()
        }
    for tied in getattr(model, "all_tied_weights_keys", {}):
        state.pop(tied, None)  # saved once, under the name it is tied to
    saved_dtype = next(iter(state.values())).dtype
    model.save_pretrained(str(folder), state_dict=state, max_shard_size="5GB")
    _set_config_dtype(folder / "config.json", saved_dtype)
    for name in PROCESSOR_FILES:
        if (processor_from / name).is_file():
            shutil.copyfile(processor_from / name, folder / name)


def _set_config_dtype(config: Path, dtype: torch.dtype) -> None:
    """Say in config.json what dtype the saved weights have."""
    content = json.loads(config.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    content["dtype"] = name
    for section in ("text_config", "vision_config"):
        if isinstance(content.get(section), dict) and "dtype" in content[section]:
            content[section]["dtype"] = name
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
