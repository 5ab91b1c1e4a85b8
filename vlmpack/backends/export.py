"""Writing a folder that transformers' `from_pretrained` loads."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.finite import refuse_non_finite_state
from vlmpack.backends.ties import is_tied, write_ties
from vlmpack.backends.unused import load_by_headers
from vlmpack.capabilities.config import prediction_entries
from vlmpack.capabilities.folder import read_config
from vlmpack.errors import ModelError
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.model_folder.extra_shards import add_tensors
from vlmpack.model_folder.load import write_as_loaded
from vlmpack.model_folder.quantised import is_quantised
from vlmpack.model_folder.weights import raise_misfits
from vlmpack.whole_file import read_json, share_as

logger = logging.getLogger("vlmpack")


def save_model_folder(
    model: Any,
    state: dict[str, Tensor],
    folder: Path,
    *,
    processor_from: Path,
    dtype: torch.dtype | None,
) -> None:
    """Write config, weights and processor files. Called on one rank.

    Tensors of the pretrained folder that training does not read are copied unchanged, in files of
    their own. Multi-token prediction is one example.

    Args:
        state: whole tensors under transformers' names.
        dtype: of the saved weights, except those that transformers keeps in float32. None keeps
            that of `state`.

    Raises:
        ModelError: a tensor that training does not read cannot be copied, or the written folder
            would not load whole.
        NonFiniteError: a tensor would hold values that are no numbers.
    """
    saved_dtype = next(iter(state.values())).dtype if dtype is None else dtype
    state = {
        name: value.to(saved_dtype) if _is_cast(model, name, value) and dtype is not None else value
        for name, value in state.items()
    }
    refuse_non_finite_state(state, model, "export.dtype: float32 holds what float16 cannot")
    ties = getattr(model, "all_tied_weights_keys", {})
    if ties and is_tied(model, state):
        for tied in ties:
            state.pop(tied, None)  # saved once, under the name it is tied to
    elif ties:
        write_ties(model.config, tied=False)
    with _bare_experts(model):
        model.save_pretrained(str(folder), state_dict=state, max_shard_size="5GB")
    _write_config_entries(folder / "config.json", saved_dtype, read_config(processor_from))
    loaded = load_by_headers(processor_from)
    if loaded.unused and is_quantised(processor_from):
        logger.warning(
            "note: %s are not in the export, which is dense; in %s they are quantised",
            loaded.unused_words,
            processor_from,
        )
    elif loaded.unused:
        add_tensors(folder, loaded.unused)
        logger.info("%s are in the export as in %s", loaded.unused_words, processor_from)
    share_as(folder / "config.json", "*.safetensors")
    for name in PROCESSOR_FILES:
        if (processor_from / name).is_file():
            shutil.copyfile(processor_from / name, folder / name)
    write_as_loaded(processor_from, folder)
    try:
        raise_misfits(folder, load_by_headers(folder).info)
    except ModelError as error:
        raise ModelError(f"the model was not written whole: {error}") from error


@contextmanager
def _bare_experts(model: Any) -> Iterator[None]:
    """A context without peft's wrappers of experts, whose shapes transformers asks by name."""
    wrappers = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "parameter_name") and not name.endswith(".base_layer")
    }
    for name, wrapper in wrappers.items():
        model.set_submodule(name, wrapper.get_base_layer())
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper)


def _is_cast(model: Any, name: str, value: Tensor) -> bool:
    """Whether a tensor is saved in the model's dtype: not where transformers keeps it in float32
    whatever that is, such as the bias by which DeepSeek-V3 chooses experts."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    is_strict = any(f".{part}." in f".{name}." for part in strict)
    return value.is_floating_point() and not is_strict


def _write_config_entries(config: Path, dtype: torch.dtype, source: Mapping[str, Any]) -> None:
    """Say in config.json what dtype the saved weights have, and of multi-token prediction what the
    pretrained folder says: some classes of transformers leave its entries out."""
    content = read_json(config)
    name = str(dtype).removeprefix("torch.")
    content |= prediction_entries(source) | {"dtype": name}
    for key, section in content.items():
        if not isinstance(section, dict):
            continue
        if key in ("text_config", "vision_config") and "dtype" in section:
            section["dtype"] = name
        before = source.get(key)
        section |= prediction_entries(before) if isinstance(before, Mapping) else {}
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
