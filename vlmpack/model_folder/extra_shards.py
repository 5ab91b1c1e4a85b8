"""Tensors that go from one model folder into another bit for bit, in files of their own.

    model.safetensors                 ->  model-00001-of-00002.safetensors, the same file
                                          model-00002-of-00002.safetensors, what was added
                                          model.safetensors.index.json

Nothing is decoded. Dtype, shape and bytes are copied.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vlmpack.errors import ModelError
from vlmpack.model_folder.safetensors_read import StoredTensor
from vlmpack.model_folder.weights import INDEX, stored_tensors, weight_files
from vlmpack.whole_file import open_regular, share_as

MAX_SHARD_BYTES = 5_000_000_000
"""The size up to which one file is filled; a larger tensor has a file to itself."""

_CHUNK_BYTES = 1 << 24


def add_tensors(
    folder: Path, tensors: Sequence[StoredTensor], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Add tensors of other files to a folder of safetensors files, and its index to match.

    Args:
        tensors: must have no name that the folder has. Nothing is done if there are none.

    Raises:
        ModelError: a name that the folder has already, or a file that cannot be read.
    """
    if not tensors:
        return
    there = weight_files(folder)
    names = {tensor.name for path in there for tensor in stored_tensors(path)}
    twice = sorted(names & {tensor.name for tensor in tensors})
    if twice:
        raise ModelError(f"{folder} has {twice[0]} already, so it cannot be added unread")
    groups = _groups(tensors, max_shard_bytes)
    total = len(there) + len(groups)
    files = [
        folder / f"model-{number + 1:05d}-of-{total:05d}.safetensors" for number in range(total)
    ]
    for path, file in zip(there, files, strict=False):
        path.rename(file)
    for group, file in zip(groups, files[len(there) :], strict=True):
        write_stored(file, group)
    _write_index(folder / INDEX, files)


def rename_tensors(folder: Path, renamed: Callable[[str], str]) -> None:
    """Give tensors of a folder other names, file by file; bytes stay.

    Args:
        renamed: a name -> that which it gets, or itself.

    Raises:
        ModelError: a file that cannot be read.
    """
    files = weight_files(folder)
    for path in files:
        stored = stored_tensors(path)
        given = [replace(tensor, name=renamed(tensor.name)) for tensor in stored]
        if given != stored:
            written = path.with_name(f"{path.name}.renamed")
            write_stored(written, given)
            share_as(path, written.name)
            written.replace(path)
    if (folder / INDEX).is_file():
        _write_index(folder / INDEX, files)


def write_stored(path: Path, tensors: Iterable[StoredTensor]) -> None:
    """Write a safetensors file of tensors that lie in others; one chunk is in memory at a time.

    Raises:
        ModelError: a file that cannot be read, or ends early.
    """
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for tensor in tensors:
        start, stop = stop, stop + tensor.stop - tensor.start
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (start, stop),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with path.open("xb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for data in _chunks(tensor):
                target.write(data)
        target.flush()
        os.fsync(target.fileno())


def _chunks(tensor: StoredTensor) -> Iterator[bytes]:
    """The bytes of a tensor, a few megabytes at a time."""
    try:
        with open_regular(tensor.file) as source:
            source.seek(tensor.start)
            remaining = tensor.stop - tensor.start
            while remaining:
                data = source.read(min(remaining, _CHUNK_BYTES))
                if not data:
                    raise OSError(f"it ends within {tensor.name}")
                yield data
                remaining -= len(data)
    except OSError as error:
        raise ModelError(f"model.path: {tensor.file} cannot be read: {error}") from error


def _groups(tensors: Iterable[StoredTensor], most: int) -> list[list[StoredTensor]]:
    """Tensors in order, cut before the one with which a file would be larger than that."""
    groups: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        length = tensor.stop - tensor.start
        if groups[-1] and filled + length > most:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += length
    return groups


def _write_index(path: Path, files: Sequence[Path]) -> None:
    """The index of these files, with the counts that transformers writes."""
    stored = [tensor for file in files for tensor in stored_tensors(file)]
    content = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in stored),
            "total_size": sum(tensor.stop - tensor.start for tensor in stored),
        },
        "weight_map": {tensor.name: tensor.file.name for tensor in stored},
    }
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
