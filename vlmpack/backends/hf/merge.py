"""Adapters of a folder into the weights that they are beside, by peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vlmpack.backends.adapter_folder import PREFIX, weights_file
from vlmpack.backends.finite import refuse_odd_adapters
from vlmpack.backends.ties import FLAG, is_tied, write_ties
from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.errors import ModelError
from vlmpack.model_folder.weights import first
from vlmpack.words import counted, twice


def merge_adapter(model: Any, folder: Path) -> Any:
    """A model with the adapters of a folder inside of its weights, and what was trained in full
    beside them in the place of its own.

    Args:
        model: transformers', in float32 on CPU; what holds its weights afterwards is what is
            returned. Its config says whether head and embedding are still one.
        folder: in peft's format; LoRA with all that peft knows of it.

    Raises:
        ModelError: the folder cannot be read, is of another model, or cannot be merged.
    """
    was_tied = bool(getattr(model.config, FLAG, False))
    beside = _adapted(model, folder)
    if without := _without_bias(beside):
        raise ModelError(
            f"{folder}: its adapters cannot be merged: they have biases (lora_bias), and "
            f"{counted(len(without), 'layer')} that they are beside none ({first(without)})"
        )
    untie(beside)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that they are untied, settled below
            merged = beside.merge_and_unload()
    except Exception as error:
        raise ModelError(f"{folder}: its adapters cannot be merged: {_said(error)}") from error
    left = [name for name, _ in merged.named_parameters() if ".lora_" in name]
    if left:
        raise ModelError(
            f"{folder}: its adapters cannot be merged: {counted(len(left), 'tensor')} of adapters "
            f"inside of modules that were trained in full ({first(left)})"
        )
    if was_tied:
        write_ties(merged.config, tied=True)  # which peft denies of equal tensors, too
        write_ties(merged.config, tied=is_tied(merged, merged.state_dict()))
        merged.tie_weights()  # as the config says: the next adapters may ask
    return merged


def untie(model: nn.Module) -> None:
    """Give a weight that stands at several places a tensor of its own at each.

    An adapter beside one of them is merged into that one alone.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if value.data_ptr() in seen:
                setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=False))
            seen.add(value.data_ptr())


def _adapted(model: Any, folder: Path) -> Any:
    """peft's model with the adapters of a folder beside the weights; raises ModelError."""
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    config = AdapterConfig.read(folder)
    if config.refusal is not None:
        raise ModelError(f"{folder}: {config.refusal}")
    path = weights_file(folder)
    try:
        refuse_odd_adapters(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    integers = {PREFIX + name for name, value in model.named_buffers() if not _is_float(value)}
    try:
        tensors = load_file(str(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing names, which are told below
            # A setting that this version of peft has no idea of is none to leave out.
            warnings.filterwarnings("error", "Unexpected keyword arguments", UserWarning)
            made: Any = PeftConfig
            beside = PeftModel(model, made.from_peft_type(**config.values))
            found: Any = set_peft_model_state_dict(beside, tensors)
    except Exception as error:  # of anything: settings and tensors are whatever the folder says
        raise ModelError(f"{folder}: its adapters do not fit the model: {_said(error)}") from error
    filled = len(beside.state_dict()) - len(found.missing_keys)
    odd = {
        "without a place in the model": sorted(found.unexpected_keys),
        "without a tensor in the folder": sorted(n for n in found.missing_keys if ".lora_" in n),
        "of whole numbers": sorted(
            n for n, value in tensors.items() if not _is_float(value) and n not in integers
        ),
    }
    if listed := [f"{len(names)} {what} ({first(names)})" for what, names in odd.items() if names]:
        raise ModelError(f"{folder}: its adapters do not fit the model: {'; '.join(listed)}")
    if filled < len(tensors):
        raise ModelError(
            f"{folder}: its adapters do not fit the model: {path.name} has "
            f"{counted(len(tensors), 'tensor')} for {filled} of the model's; expected one for each "
            f"({first(_twice(tensors)) or 'under an older name and a newer one'})"
        )
    return beside


def _without_bias(beside: Any) -> list[str]:
    """Names of layers without a bias whose adapters have one."""
    from peft.tuners.lora import LoraLayer

    return [
        name.removeprefix(PREFIX)
        for name, layer in beside.named_modules()
        if isinstance(layer, LoraLayer) and any(layer.lora_bias.values())
        if getattr(layer.get_base_layer(), "bias", None) is None
    ]


def _twice(names: Iterable[str]) -> list[str]:
    """Names that another one of them is, but for the adapter's name inside of it."""
    plain = [name.replace(".modules_to_save", "").replace(".default", "") for name in names]
    return sorted(twice(plain))


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point()


def _said(error: Exception) -> str:
    """The first line of what an exception says, with its class where that says little."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if " " in lines[0] else f"{type(error).__name__}: {lines[0]}"
