"""A model folder -> the line that serves it, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vlmpack.capabilities import adapter_config
from vlmpack.capabilities.refused import refusal
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.whole_file import read_json
from vlmpack.words import meant_path


def served_model_type(folder: Path) -> str:
    """The model_type of a folder that can be trained: a key of `SERVED`, or the generic family's.

    Raises:
        ModelError: the folder or its config.json is missing or unreadable.
        CapabilityError: no family serves it; the message says why.
    """
    config = read_config(folder)
    why = refusal(config)
    if why is not None:
        raise CapabilityError(f"model.path: {folder}: {why}")
    model_type = config["model_type"]
    assert isinstance(model_type, str)
    return model_type


def refuse_adapters(folder: Path) -> None:
    """Say what to do with a folder of adapters where a whole model is wanted.

    Raises:
        ModelError: it is one.
    """
    if not (folder / adapter_config.NAME).is_file():
        return
    why = adapter_config.AdapterConfig.read(folder).refusal
    hint = "merge them first (vlmpack merge), or give the folder of their base model, and these "
    hint = f"nor can these be merged: {why}" if why else f"{hint}as model.adapter"
    raise ModelError(
        f"model.path: {folder} holds adapters ({adapter_config.NAME}); expected a whole model: "
        f"{hint}"
    )


def read_config(folder: Path) -> Mapping[str, object]:
    """The content of config.json.

    Raises:
        ModelError: the folder or its config.json is missing or unreadable.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        start = (
            "" if folder.is_absolute() else f" (relative to {Path.cwd()}, the current directory)"
        )
        raise ModelError(
            f"model.path: {folder}{start} is not a folder; expected a model in transformers format "
            f"(config.json, *.safetensors, tokenizer and processor files)"
            f"{_download(folder)}{meant_path(folder)}"
        )
    if not path.exists():
        refuse_adapters(folder)
        export = folder / "export"
        hint = (
            f" (a run's model is in its folder export: {export})"
            if (export / "config.json").is_file()
            else ""
        )
        raise ModelError(
            f"model.path: {folder} has no config.json; it is no transformers model{hint}"
        )
    for other in folder.iterdir():  # transformers opens them, and would wait for a pipe's bytes
        if other.exists() and not (other.is_file() or other.is_dir()):
            raise ModelError(f"model.path: {other} is no regular file; expected files alone")
    try:
        content = read_json(path, object)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model.path: {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"model.path: {path} holds no JSON object, so it names no model_type")
    return content


_HOMES = ("models", "model", "checkpoints")
"""Folders that models are kept in: owners of none."""


def _download(folder: Path) -> str:
    """How to get a model of the Hub, where its id seems to be meant: owner and name, and no folder
    of the owner's name."""
    owner = folder.parent
    if owner.name in _HOMES:
        return (
            f"; a model of the Hub is downloaded first: hf download ORG/{folder.name} --local-dir "
            f"{folder}, with its owner there for ORG"
        )
    parent = owner.parent
    if not owner.name or owner.exists() or not parent.is_dir() or str(parent) == parent.anchor:
        return ""
    return (
        f"; a model of the Hub is downloaded first: hf download {owner.name}/{folder.name} "
        f"--local-dir {folder}"
    )
