"""A digest of every tensor of a folder, whatever files they are spread over.

File headers give the tensors, which are cut into pieces of at most 64 MiB. Threads and ranks share
the pieces and hash them. A tensor's digest covers its dtype, its shape and the digests of its
pieces.

Digests are cached, so that a launch does not read weights only to hash them. A file is identified
by device, inode, size, mtime and ctime in nanoseconds. A file that was touched, replaced or written
to has another ctime, which nobody can set back, and is hashed again. A file that changed less than
3 seconds before is not cached, since a clock may tick too slowly to show the next change.

Threads of all ranks compute digests while the model loads. Ranks that see the same files share the
work. A machine with its own copy hashes that one, and all copies must be equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from vlmpack.activity import ACTIVITY
from vlmpack.distributed import Ranks
from vlmpack.errors import ModelError
from vlmpack.file_format import DIGESTS, FORMAT
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.model_folder.finite import non_finite_values
from vlmpack.model_folder.safetensors_read import StoredTensor, tensors_of
from vlmpack.model_folder.weights import first, weight_files
from vlmpack.whole_file import open_regular, read_json, regular_bytes, write_atomically

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
    """What was found of a piece."""

    digest: bytes
    non_finite: frozenset[str]


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
    digest, non_finite = hashlib.sha256(), set[str]()
    try:
        with open_regular(piece.file) as file:
            for start in range(piece.start, piece.stop, _READ_BYTES):
                num_bytes = min(_READ_BYTES, piece.stop - start)
                data = os.pread(file.fileno(), num_bytes, start)
                if len(data) != num_bytes:
                    raise OSError(f"it ends at byte {start + len(data):,}")
                digest.update(data)
                non_finite |= non_finite_values(data, piece.dtype)
    except OSError as error:
        raise ModelError(f"model.path: {piece.file} cannot be read: {error}") from error
    return Hashed(digest.digest(), frozenset(non_finite))


def tensor_digests(
    tensors: Iterable[StoredTensor], hashed: Mapping[Piece, Hashed]
) -> dict[str, str]:
    """Name -> `BF16 (64, 128) 0123...`, the last 32 hex digits."""
    digests: dict[str, str] = {}
    for tensor in tensors:
        digest = hashlib.sha256(b"".join(hashed[piece].digest for piece in pieces_of([tensor])))
        digests[tensor.name] = f"{tensor.dtype} {tensor.shape} {digest.hexdigest()[:32]}"
    return digests


YOUNG_SECONDS = 3.0
MAX_FILES = 500


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A file as it was when looked at; `is_young` says that it had changed just before."""

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
    """A small file for each file of weights. A folder that cannot be written remembers nothing."""

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


MAX_THREADS = 8

Result = TypeVar("Result")


class _View(NamedTuple):
    """A model folder as one rank sees it.

    `files` are the weight files, under a key that is the same on every machine. `small` has the
    digests of the other files that decide what is trained.
    """

    host: str
    files: tuple[str, ...]
    small: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Task:
    """What the first of the ranks that share files found.

    `unknown` are the tensors of files whose digests are not remembered.
    """

    seen: dict[Path, SeenFile]
    known: dict[str, str] = field(default_factory=dict)
    unknown: list[StoredTensor] = field(default_factory=list)


class WeightHashing:
    """A running hash of weights, made by `hashing_weights`."""

    def __init__(
        self,
        task: _Task,
        ranks: Ranks,
        views: Sequence[_View],
        remembered: RememberedDigests,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._task, self._ranks, self._views, self._remembered = task, ranks, views, remembered
        self.non_finite: dict[str, set[str]] = {}
        """Tensors with values that are no numbers, once it is finished: see `non_finite_values`."""
        self._sharing = _sharing(views, ranks.rank)
        size_first = sorted(pieces_of(task.unknown), key=lambda piece: piece.start - piece.stop)
        number = len(self._sharing)
        self._parts = {rank: size_first[i::number] for i, rank in enumerate(self._sharing)}
        self._mine: list[Future[Hashed]] = [
            executor.submit(hash_piece, piece) for piece in self._parts[ranks.rank]
        ]

    @property
    def num_bytes(self) -> int:
        """What the ranks that share these files together hash; the rest is remembered."""
        return sum(piece.stop - piece.start for part in self._parts.values() for piece in part)

    def finish(self) -> dict[str, str]:
        """Name -> dtype, shape and digest of every tensor. Collective.

        Raises:
            ModelError: on every rank; a file cannot be read, or has changed since the beginning, or
                another machine's copy holds other weights.
        """
        gathered = _on_each(self._ranks, lambda: [future.result() for future in self._mine])
        hashed: dict[Piece, Hashed] = {}
        for rank, part in self._parts.items():
            hashed.update(zip(part, gathered[rank], strict=True))
        for piece, found_there in hashed.items():
            if found_there.non_finite:
                self.non_finite.setdefault(piece.name, set()).update(found_there.non_finite)
        leads = self._ranks.rank == self._sharing[0]
        wholes = _on_each(self._ranks, lambda: self._whole(hashed) if leads else None)
        digests = wholes[0]
        assert digests is not None  # the first rank leads those that see its files
        for rank, whole in enumerate(wholes):
            if whole is not None and whole != digests:
                names = [
                    name for name in {**digests, **whole} if digests.get(name) != whole.get(name)
                ]
                raise _another(self._views, rank, f"weights: {first(sorted(names))}")
        return digests

    def _whole(self, hashed: Mapping[Piece, Hashed]) -> dict[str, str]:
        for path, seen in self._task.seen.items():
            if look_at(path).key != seen.key:
                raise ModelError(
                    f"model.path: {path} was changed while the model was loaded; start again when "
                    f"the folder is complete"
                )
        found = dict(self._task.known)
        for path, seen in self._task.seen.items():
            tensors = [tensor for tensor in self._task.unknown if tensor.file == path]
            if tensors:
                digests = tensor_digests(tensors, hashed)
                if self.non_finite.keys().isdisjoint(digests):  # else each launch is to look again
                    self._remembered.put(seen, digests)
                found |= digests
        return found


@contextmanager
def hashing_weights(
    folder: Path, ranks: Ranks, remembered: RememberedDigests
) -> Iterator[WeightHashing]:
    """Begin to hash a folder's weights. Collective; what is not done at the end is dropped.

    Raises:
        ModelError: on every rank; there are none, or a file that is damaged, or another machine's
            copy has another config, tokenizer or processor.
    """
    seen: dict[Path, SeenFile] = {}

    def look() -> _View:
        seen.update({path: look_at(path) for path in weight_files(folder)})
        return _View(
            socket.gethostname(), tuple(each.on_its_disk for each in seen.values()), _small(folder)
        )

    views = _on_each(ranks, look)
    for rank, view in enumerate(views):
        here = views[0].small
        if view.small != here:
            names = {**view.small, **here}
            other = sorted(name for name in names if view.small.get(name) != here.get(name))
            raise _another(views, rank, ", ".join(other))
    lead = _sharing(views, ranks.rank)[0]
    tasks = _on_each(ranks, lambda: _task(seen, remembered) if ranks.rank == lead else None)
    task = tasks[lead]
    assert task is not None
    threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
    executor = ThreadPoolExecutor(threads, thread_name_prefix="weights")
    try:
        yield WeightHashing(task, ranks, views, remembered, executor)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _task(seen: dict[Path, SeenFile], remembered: RememberedDigests) -> _Task:
    task = _Task(seen)
    for path, each in seen.items():
        known = remembered.get(each)
        if known is not None:
            task.known.update(known)
            continue
        try:
            task.unknown.extend(tensors_of(path))
        except ValueError as error:
            raise ModelError(f"model.path: {error}") from error
    return task


def _small(folder: Path) -> dict[str, str]:
    paths = [folder / name for name in ("config.json", *PROCESSOR_FILES)]
    there = [path for path in paths if path.is_file()]
    return {path.name: hashlib.sha256(regular_bytes(path)).hexdigest() for path in there}


def _sharing(views: Sequence[_View], rank: int) -> list[int]:
    """The ranks that see the files of that one."""
    return [other for other, view in enumerate(views) if view.files == views[rank].files]


def _another(views: Sequence[_View], rank: int, what: str) -> ModelError:
    return ModelError(
        f"model.path: the folder of rank {rank} on {views[rank].host} differs from that of rank 0 "
        f"on {views[0].host} ({what}). Expected the same model on all machines"
    )


def _on_each(ranks: Ranks, work: Callable[[], Result]) -> list[Result]:
    """What every rank's work gives, in their order. Collective; what fails is raised by all."""
    with ranks.raised_by_all(ModelError):
        try:
            result = work()
        except OSError as error:  # a file that has just gone
            raise ModelError(f"model.path: {error}") from error
    return ranks.gather_objects(result)
