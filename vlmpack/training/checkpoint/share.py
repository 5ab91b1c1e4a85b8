"""One rank's share of a checkpoint: its boxes, written file by file, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.model_folder.finite import OddValues
from vlmpack.training.checkpoint.folders import sha256
from vlmpack.training.checkpoint.host_copies import HostCopies
from vlmpack.training.checkpoint.index import StoredBox
from vlmpack.training.checkpoint.safetensors_file import (
    FileDigest,
    TensorEntry,
    TensorWriter,
    dtype_name,
)

OwnedSlices = Callable[[], Iterable[tuple[Kind, TensorSlice, Tensor]]]
"""An engine's `owned_slices`; called twice, for the header and for the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank wrote, as it tells the main rank.

    Args:
        rank: whose share this is.
        files: name -> size and hash.
        boxes: what lies in them.
        odd: tensors of which a box holds values that are no numbers; see `odd_values`.
        error: why there is none.
    """

    rank: int
    files: Mapping[str, FileDigest]
    boxes: Sequence[StoredBox]
    odd: OddValues = field(default_factory=dict)
    error: str | None = None


def write_share(folder: Path, slices: OwnedSlices, *, rank: int, world_size: int) -> Share:
    """Write one rank's boxes, at most one of which is copied at a time. Not collective.

    Raises:
        OSError: disk full, and the like; or a file does not read back as it was written.
        ValueError: a tensor is not of its box's shape.
    """
    if not folder.is_dir():
        raise OSError(
            f"{folder}, made by rank 0, is not visible here: run_dir must lie on a file system "
            f"that all machines share"
        )
    boxes: list[StoredBox] = []
    entries: dict[str, list[TensorEntry]] = {}
    for kind, box, value in slices():
        if tuple(value.shape) != box.lengths:
            raise ValueError(f"{kind} {box} has a tensor of shape {tuple(value.shape)}")
        stored = StoredBox(
            kind=kind,
            box=box,
            dtype=dtype_name(value.dtype),
            file=_share_file(kind, rank, world_size),
        )
        boxes.append(stored)
        entry = TensorEntry(key=stored.key, dtype=stored.dtype, shape=box.lengths)
        entries.setdefault(stored.file, []).append(entry)
        del value  # before the engine makes the next one
    copies = HostCopies()
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(closing(TensorWriter(folder / name, listed, copies)))
            for name, listed in entries.items()
        }
        for stored, (_, _, value) in zip(boxes, slices(), strict=True):
            writers[stored.file].write(stored.key, value)
            del value
        files = {name: writer.finish() for name, writer in writers.items()}
    for name, digest in files.items():
        if sha256(folder / name) != digest.sha256:
            raise OSError(f"{name} does not read back as it was written")
    odd = {key: values for writer in writers.values() for key, values in writer.odd.items()}
    return Share(rank=rank, files=files, boxes=boxes, odd=odd)


def _share_file(kind: Kind, rank: int, world_size: int) -> str:
    stem = "model" if kind == "model" else "optimizer"
    return f"{stem}-{rank:05d}-of-{world_size:05d}.safetensors"
