"""Tensors of a model folder that training does not read, found by the headers of its files.

transformers itself loads tensors without values (on the meta device), and this module records which
it asks for. Those are read, whatever their names become on the way. The rest is not. Most of that
is multi-token prediction, which transformers skips and which servers want back in an export.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vlmpack.capabilities.config import is_prediction
from vlmpack.capabilities.folder import read_config
from vlmpack.errors import as_model_error
from vlmpack.families.registry import family_of
from vlmpack.model_folder.load import load_shapes
from vlmpack.model_folder.quantised import dense_headers
from vlmpack.model_folder.safetensors_read import StoredTensor
from vlmpack.model_folder.weights import stored_tensors, weight_files
from vlmpack.words import counted


@dataclass(slots=True)
class Header:
    """A tensor without values that records whether its values were read, by slicing."""

    tensor: Tensor
    asked: bool = False

    def __getitem__(self, index: Any) -> Tensor:
        self.asked = True
        return self.tensor[index]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading a folder would find.

    Args:
        info: what transformers reports as missing, left over or of another shape. Empty where a
            conversion needs values, so that only the load itself can show it.
    """

    info: Mapping[str, Any]
    unused: tuple[StoredTensor, ...]
    notes: tuple[str, ...] = ()

    @property
    def unused_words(self) -> str:
        """`mtp.* (15 tensors, 0.2 MB)`; empty where everything is read."""
        if not self.unused:
            return ""
        size = sum(tensor.stop - tensor.start for tensor in self.unused) / 1e6
        number = counted(len(self.unused), "tensor")
        return (
            f"{', '.join(stems(tensor.name for tensor in self.unused))} ({number}, {size:,.1f} MB)"
        )


def load_by_headers(folder: Path) -> Loaded:
    """What loading a folder would find.

    Raises:
        ModelError: no weights, or a damaged or missing file.
        CapabilityError: no family serves its model_type.
    """
    stored = [tensor for path in weight_files(folder) for tensor in stored_tensors(path)]
    headers = {name: Header(tensor) for name, tensor in dense_headers(folder).items()}
    auto_class = family_of(folder).auto_class()
    failed = as_model_error(f"model.path: {folder} cannot be loaded", OSError, ValueError, KeyError)
    try:
        with failed, _quiet():
            info = load_shapes(auto_class, folder, headers)
    except (NotImplementedError, RuntimeError):  # the remaining tensors were not asked for
        config = read_config(folder)
        return Loaded({}, tuple(tensor for tensor in stored if is_prediction(tensor.name, config)))
    return Loaded(info, tuple(x for x in stored if x.name in headers and not headers[x.name].asked))


def stems(names: Iterable[str]) -> list[str]:
    """The common beginnings of names, one for each first word, as mtp.* or model.layers.61.*."""
    groups: dict[str, list[list[str]]] = {}
    for name in sorted(names):
        parts = name.split(".")
        groups.setdefault(parts[0], []).append(parts)
    return [
        f"{'.'.join(_common(group))}{'.*' if len(group) > 1 else ''}" for group in groups.values()
    ]


def _common(names: list[list[str]]) -> list[str]:
    """The words with which all of them begin; all words of a single one."""
    same = [len(set(words)) == 1 for words in zip(*names, strict=False)]
    return names[0][: same.index(False) if False in same else len(same)]


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
