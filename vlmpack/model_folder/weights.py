"""Which files hold a folder's weights: safetensors alone, all of them inside the folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vlmpack.capabilities.config import is_prediction
from vlmpack.capabilities.folder import read_config
from vlmpack.errors import UNREADABLE, ModelError
from vlmpack.model_folder.safetensors_read import StoredTensor, tensors_of
from vlmpack.whole_file import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
"""Formats that are refused by name; the first four are pickles, which run code when opened."""


_MISFITS = ("missing_keys", "unexpected_keys", "mismatched_keys")

_ENDS = ("lm_head.weight", "embed_tokens.weight")
"""Names of the two tensors that are one in a tied model."""


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads. Links are followed: the Hub's cache is made of them.

    Raises:
        ModelError: there are none, one that the index lists is missing, or the index lists
            something else than safetensors files of the folder itself.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(f"model.path: {folder} has no weights; expected {_expected(folder)}")
    try:
        names = set(read_json(index)["weight_map"].values())
    except UNREADABLE as error:
        raise ModelError(f"model.path: {index} is no index of weights: {error!r}") from error
    bad = sorted(repr(name) for name in names if not _is_plain(name))
    if bad:
        raise ModelError(
            f"model.path: {index} lists {first(bad)}; expected names of *.safetensors files in the "
            f"same folder"
        )
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"model.path: {folder} lacks {len(missing)} of the {len(names)} weight files that "
            f"{INDEX} lists: {first(missing)}"
        )
    return sorted(folder / name for name in names)


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Where the tensors of one of a folder's weight files lie.

    Raises:
        ModelError: no safetensors file, or a damaged one.
    """
    try:
        return tensors_of(path)
    except ValueError as error:
        raise ModelError(f"model.path: {error}") from error


def first(names: Iterable[str]) -> str:
    """The first five of them."""
    names = list(names)
    return f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"


def raise_misfits(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise ModelError for what transformers says was missing, left over or of another shape; what
    is left over of multi-token prediction stays as it is."""
    config = read_config(folder)
    misfits = {kind: sorted(map(str, info.get(kind, ()))) for kind in _MISFITS}
    misfits["unexpected_keys"] = [
        name for name in misfits["unexpected_keys"] if not is_prediction(name, config)
    ]
    problems = [
        f"{kind.replace('_', ' ')}: {first(names)}" for kind, names in misfits.items() if names
    ]
    if any(name.endswith(_ENDS) for name in misfits["missing_keys"]):
        problems.append(
            "head and embedding are one tensor only where config.json says tie_word_embeddings: "
            "true"
        )
    if problems:
        raise ModelError(
            f"model.path: the weights in {folder} do not fit its config.json "
            f"({'; '.join(problems)})"
        )


def _is_plain(name: object) -> bool:
    """Whether it can only be a safetensors file in the folder itself."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not set(name) & {"/", "\\", ":", "\0"}
    )


def _expected(folder: Path) -> str:
    files = f"{SINGLE}, or {INDEX} and the files that it lists, beside config.json"
    others = sorted(path.name for kind in OTHER_WEIGHTS for path in folder.glob(kind))
    if not others:
        return files
    return (
        f"{files}; {first(others)} {'is' if len(others) == 1 else 'are'} never opened, since "
        f"safetensors files alone hold nothing but numbers: save the model as such first"
    )
