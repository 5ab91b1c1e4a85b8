"""A digest of every tensor of a folder, whatever files they are spread over.

Files -> tensors, by their headers -> pieces of at most 64 MiB, which threads and ranks share -> the
digest of each piece -> that of each tensor: of dtype, shape and the digests of its pieces.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmpack.errors import ModelError

DIGESTS_VERSION = 1
"""Raise it when other digests come out for the same tensors."""

PIECE_BYTES = 64 << 20
_READ_BYTES = 4 << 20
_MAX_HEADER_BYTES = 100_000_000
"""That of the safetensors format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header has it.

    Args:
        file: that holds it.
        name: in the file.
        dtype: in safetensors' spelling.
        shape: its lengths.
        start, stop: its bytes in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor's bytes, hashed at once."""

    file: Path
    name: str
    start: int
    stop: int


def tensors_of(path: Path) -> list[StoredTensor]:
    """What a safetensors file holds.

    Raises:
        ModelError: it is damaged, cut off, or no such file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        found = [
            StoredTensor(
                path,
                name,
                str(said["dtype"]),
                tuple(int(n) for n in said["shape"]),
                *(8 + length + int(offset) for offset in said["data_offsets"]),
            )
            for name, said in header.items()
            if name != "__metadata__"
        ]
        if any(not 0 <= tensor.start <= tensor.stop <= size for tensor in found):
            raise ValueError(f"its {size:,} bytes do not hold all of its tensors")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model.path: {path} is damaged or cut off: {error}") from error
    return found


def pieces_of(tensors: Iterable[StoredTensor]) -> Iterator[Piece]:
    """In order; a tensor without elements has none."""
    for tensor in tensors:
        for start in range(tensor.start, tensor.stop, PIECE_BYTES):
            stop = min(tensor.stop, start + PIECE_BYTES)
            yield Piece(tensor.file, tensor.name, start, stop)


def hash_piece(piece: Piece) -> bytes:
    """SHA-256 of the bytes; the interpreter's lock is free meanwhile.

    Raises:
        ModelError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with piece.file.open("rb", buffering=0) as file:
            for start in range(piece.start, piece.stop, _READ_BYTES):
                wanted = min(_READ_BYTES, piece.stop - start)
                data = os.pread(file.fileno(), wanted, start)
                if len(data) != wanted:
                    raise OSError(f"it ends at byte {start + len(data):,}")
                digest.update(data)
    except OSError as error:
        raise ModelError(f"model.path: {piece.file} cannot be read: {error}") from error
    return digest.digest()


def tensor_digests(
    tensors: Iterable[StoredTensor], hashed: Mapping[Piece, bytes]
) -> dict[str, str]:
    """Name -> `BF16 (64, 128) 0123...`, the last 32 hex digits.

    Args:
        tensors: any.
        hashed: digest of each of their pieces.
    """
    found: dict[str, str] = {}
    for tensor in tensors:
        digest = hashlib.sha256(b"".join(hashed[piece] for piece in pieces_of([tensor])))
        found[tensor.name] = f"{tensor.dtype} {tensor.shape} {digest.hexdigest()[:32]}"
    return found
