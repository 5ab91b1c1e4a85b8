"""A digest of every tensor of a folder, whatever files they are spread over.

Files -> tensors, by their headers -> pieces of at most 64 MiB, which threads and ranks share -> the
digest of each piece -> that of each tensor: of dtype, shape and the digests of its pieces.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vlmpack.activity import ACTIVITY
from vlmpack.errors import ModelError
from vlmpack.model_folder.finite import odd_values
from vlmpack.model_folder.safetensors_header import StoredTensor
from vlmpack.whole_file import open_regular

PIECE_BYTES = 64 << 20
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor's bytes, hashed at once."""

    file: Path
    name: str
    dtype: str
    start: int
    stop: int


class Hashed(NamedTuple):
    """What was found of a piece.

    Args:
        digest: SHA-256 of its bytes.
        odd: which of its values are no numbers; see `odd_values`.
    """

    digest: bytes
    odd: frozenset[str]


def pieces_of(tensors: Iterable[StoredTensor]) -> Iterator[Piece]:
    """In order; a tensor without elements has none."""
    for tensor in tensors:
        for start in range(tensor.start, tensor.stop, PIECE_BYTES):
            stop = min(tensor.stop, start + PIECE_BYTES)
            yield Piece(tensor.file, tensor.name, tensor.dtype, start, stop)


def hash_piece(piece: Piece) -> Hashed:
    """Read, hash and look at the bytes; the interpreter's lock is free meanwhile.

    Raises:
        ModelError: the file cannot be read.
    """
    ACTIVITY.worked()
    digest, odd = hashlib.sha256(), set[str]()
    try:
        with open_regular(piece.file) as file:
            for start in range(piece.start, piece.stop, _READ_BYTES):
                wanted = min(_READ_BYTES, piece.stop - start)
                data = os.pread(file.fileno(), wanted, start)
                if len(data) != wanted:
                    raise OSError(f"it ends at byte {start + len(data):,}")
                digest.update(data)
                odd |= odd_values(data, piece.dtype)
    except OSError as error:
        raise ModelError(f"model.path: {piece.file} cannot be read: {error}") from error
    return Hashed(digest.digest(), frozenset(odd))


def tensor_digests(
    tensors: Iterable[StoredTensor], hashed: Mapping[Piece, Hashed]
) -> dict[str, str]:
    """Name -> `BF16 (64, 128) 0123...`, the last 32 hex digits.

    Args:
        tensors: any.
        hashed: each of their pieces.
    """
    found: dict[str, str] = {}
    for tensor in tensors:
        digest = hashlib.sha256(b"".join(hashed[piece].digest for piece in pieces_of([tensor])))
        found[tensor.name] = f"{tensor.dtype} {tensor.shape} {digest.hexdigest()[:32]}"
    return found
