"""The digests of a folder's weights, made by threads of all ranks while the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vlmpack.distributed import Ranks
from vlmpack.errors import ModelError
from vlmpack.model_folder.digests import (
    Piece,
    StoredTensor,
    hash_piece,
    pieces_of,
    tensor_digests,
    tensors_of,
)
from vlmpack.model_folder.remembered import RememberedDigests, SeenFile, look_at
from vlmpack.model_folder.weights import weight_files

MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Task:
    """What the main rank found.

    Args:
        seen: every file of weights, before any is hashed.
        known: digests that are remembered.
        unknown: the tensors of the other files.
    """

    seen: dict[Path, SeenFile]
    known: dict[str, str] = field(default_factory=dict)
    unknown: list[StoredTensor] = field(default_factory=list)


class WeightHashing:
    """Work that has begun; `hashing_weights` makes one.

    Args:
        task: the same on every rank.
        ranks: who this process is.
        remembered: digests of earlier launches.
        executor: what this rank hashes with.
    """

    def __init__(
        self,
        task: _Task,
        ranks: Ranks,
        remembered: RememberedDigests,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._task, self._ranks, self._remembered = task, ranks, remembered
        size_first = sorted(pieces_of(task.unknown), key=lambda piece: piece.start - piece.stop)
        self._shares = [size_first[rank :: ranks.world_size] for rank in range(ranks.world_size)]
        self._mine: list[Future[bytes]] = [
            executor.submit(hash_piece, piece) for piece in self._shares[ranks.rank]
        ]

    @property
    def num_bytes(self) -> int:
        """What all ranks together hash; the rest is remembered."""
        return sum(piece.stop - piece.start for share in self._shares for piece in share)

    def finish(self) -> dict[str, str]:
        """Name -> dtype, shape and digest of every tensor. Collective.

        Raises:
            ModelError: on every rank; a file cannot be read, or has changed since the beginning.
        """
        mine: list[bytes] = []
        problem: str | None = None
        try:
            mine = [future.result() for future in self._mine]
        except ModelError as error:
            problem = str(error)
        gathered = self._ranks.gather_objects((mine, problem))
        problems = [text for _, text in gathered if text is not None]
        if problems:
            raise ModelError("; ".join(dict.fromkeys(problems)))
        hashed: dict[Piece, bytes] = {}
        for share, (digests, _) in zip(self._shares, gathered, strict=True):
            hashed.update(zip(share, digests, strict=True))
        return self._ranks.on_main(lambda: self._whole(hashed))

    def _whole(self, hashed: Mapping[Piece, bytes]) -> dict[str, str]:
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
                self._remembered.put(seen, digests)
                found |= digests
        return found


@contextmanager
def hashing_weights(
    folder: Path, ranks: Ranks, remembered: RememberedDigests
) -> Iterator[WeightHashing]:
    """Begin to hash a folder's weights. Collective; what is not done at the end is dropped.

    Raises:
        ModelError: there are none, or a file that is damaged.
    """

    def look() -> _Task:
        task = _Task({path: look_at(path) for path in weight_files(folder)})
        for path, seen in task.seen.items():
            known = remembered.get(seen)
            if known is None:
                task.unknown.extend(tensors_of(path))
            else:
                task.known.update(known)
        return task

    task = ranks.on_main(look)
    threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
    executor = ThreadPoolExecutor(threads, thread_name_prefix="weights")
    try:
        yield WeightHashing(task, ranks, remembered, executor)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
