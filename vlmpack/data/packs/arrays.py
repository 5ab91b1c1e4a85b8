"""Which samples share a pack, and where the packs lie, in one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.packs import PackArrays
from vlmpack.errors import PacksError

ARRAYS = "packs.safetensors"


@dataclass(frozen=True, slots=True)
class PackSpans:
    """Where each of P packs lies.

    Args:
        files: (P,) which of the folder's tars.
        offsets, lengths, crc32s: (P,) of its span in the tar.
    """

    files: Int64s
    offsets: Int64s
    lengths: Int64s
    crc32s: Int64s

    def to_mapping(self) -> dict[str, Int64s]:
        """The arrays by the names of their fields."""
        return {f"span_{name}": getattr(self, name) for name in self.__slots__}


def save_arrays(arrays: PackArrays, spans: PackSpans | None) -> bytes:
    """The content of the file of arrays."""
    columns = {**arrays.to_mapping(), **(spans.to_mapping() if spans is not None else {})}
    content: bytes = save({name: np.ascontiguousarray(a) for name, a in columns.items()})
    return content


def load_arrays(path: Path, data: bytes) -> tuple[PackArrays, PackSpans | None]:
    """What `save_arrays` wrote.

    Args:
        path: for messages.
        data: the file's content.

    Raises:
        PacksError: not such a file.
    """
    try:
        found: Mapping[str, Any] = load(data)
        arrays = PackArrays(**{name: found[name] for name in PackArrays.__slots__})
        if "span_files" not in found:
            return arrays, None
        return arrays, PackSpans(**{name: found[f"span_{name}"] for name in PackSpans.__slots__})
    except (SafetensorError, KeyError) as error:
        raise PacksError(f"packing.path: {path} cannot be read: {error!r}") from error
