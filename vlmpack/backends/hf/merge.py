"""Adapters of a folder into the weights that they are beside, by peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from vlmpack.backends.adapter_folder import weights_file
from vlmpack.backends.finite import refuse_odd_adapters
from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.errors import ModelError
from vlmpack.model_folder.weights import first

_MISFITS = (ValueError, KeyError, RuntimeError, TypeError, UserWarning)
"""What peft raises of settings and tensors that it cannot use."""


def merge_adapter(model: Any, folder: Path) -> Any:
    """A model with the adapters of a folder inside of its weights, and what was trained in full
    beside them in the place of its own.

    Args:
        model: transformers', in float32 on CPU; what holds its weights afterwards is what is
            returned.
        folder: in peft's format; LoRA with all that peft knows of it.

    Raises:
        ModelError: the folder cannot be read, or is of another model.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = AdapterConfig.read(folder)
    if config.refusal is not None:
        raise ModelError(f"{folder}: {config.refusal}")
    try:
        refuse_odd_adapters(weights_file(folder))
        tensors = load_file(str(weights_file(folder)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing names, which are told below
            # A setting that this version of peft has no idea of is none to leave out.
            warnings.filterwarnings("error", "Unexpected keyword arguments", UserWarning)
            made: Any = PeftConfig
            beside = PeftModel(model, made.from_peft_type(**config.values))
            found: Any = set_peft_model_state_dict(beside, tensors)
    except (OSError, SafetensorError, *_MISFITS) as error:
        said = str(error).strip().splitlines()[0]
        raise ModelError(f"{folder}: its adapters do not fit the model: {said}") from error
    odd = {
        "without a place in the model": sorted(found.unexpected_keys),
        "without a tensor in the folder": sorted(n for n in found.missing_keys if ".lora_" in n),
    }
    if listed := [f"{len(names)} {what} ({first(names)})" for what, names in odd.items() if names]:
        raise ModelError(f"{folder}: its adapters do not fit the model: {'; '.join(listed)}")
    return beside.merge_and_unload()
