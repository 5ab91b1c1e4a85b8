"""A digest of every tensor of a folder, whatever files they are spread over.

Files -> tensors, by their headers -> pieces of at most 64 MiB, which threads and ranks share -> the
digest of each piece -> that of each tensor: of dtype, shape and the digests of its pieces.

Digests are remembered, so that a launch reads no weights only to hash them. A file is known again
by device, inode, size, mtime and ctime in nanoseconds: one that was touched, replaced or written to
has another ctime, which nobody can set back, and is hashed again. A file that changed less than 3
seconds before it was looked at is not remembered, since a clock may tick too slowly to show the
next change.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vlmpack.activity import ACTIVITY
from vlmpack.errors import ModelError
from vlmpack.file_format import DIGESTS, FORMAT
from vlmpack.model_folder.finite import odd_values
from vlmpack.model_folder.safetensors_read import StoredTensor
from vlmpack.whole_file import open_regular, read_json, write_atomically

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


YOUNG_SECONDS = 3.0
MAX_FILES = 500


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A file as it was when looked at.

    Args:
        key: what it is known by.
        is_young: whether it had changed just before.
    """

    key: str
    is_young: bool

    @property
    def on_its_disk(self) -> str:
        """The key without the device, whose number each machine gives by itself."""
        return self.key.partition("-")[2]


def look_at(path: Path) -> SeenFile:
    """Look at a file, or at what a link leads to; raises OSError."""
    now, seen = time.time(), path.stat()
    parts = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
    changed = max(seen.st_mtime, seen.st_ctime)
    return SeenFile("-".join(map(str, parts)), is_young=now - changed < YOUNG_SECONDS)


@dataclass(frozen=True, slots=True)
class RememberedDigests:
    """One small file for each file of weights.

    Args:
        folder: where; one that cannot be written remembers nothing.
    """

    folder: Path

    def get(self, seen: SeenFile) -> dict[str, str] | None:
        """The digests of a file's tensors; None where they are not known."""
        try:
            content = read_json(self._place(seen))
            tensors: dict[str, str] = content["tensors"]
            if content.get(FORMAT) != DIGESTS.number or content["check"] != _check(seen, tensors):
                return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return tensors

    def put(self, seen: SeenFile, tensors: Mapping[str, str]) -> None:
        """Remember them; `seen` is from before the file was hashed."""
        if seen.is_young:
            return
        place = self._place(seen)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            content = DIGESTS.mark({"tensors": dict(tensors), "check": _check(seen, tensors)})
            write_atomically(place, json.dumps(content))
            oldest = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in oldest[:-MAX_FILES]:
                path.unlink()
        except OSError:
            return  # the next launch hashes again

    def _place(self, seen: SeenFile) -> Path:
        name = hashlib.sha256(f"{DIGESTS.number}/{seen.key}".encode()).hexdigest()[:32]
        return self.folder / f"{name}.json"


def _check(seen: SeenFile, tensors: Mapping[str, str]) -> str:
    said = json.dumps([seen.key, sorted(tensors.items())])
    return hashlib.sha256(said.encode()).hexdigest()
