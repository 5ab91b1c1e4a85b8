"""Saving: started on all ranks, written by each, published by all together.

A rank writes its part, the boxes that it owns, file by file and tensor by tensor.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vlmpack.activity import ACTIVITY
from vlmpack.backends.boxes import Kind, TensorSlice
from vlmpack.distributed import Ranks
from vlmpack.errors import CheckpointError, NonFiniteError
from vlmpack.file_format import CHECKPOINT
from vlmpack.model_folder.finite import NonFiniteValues, non_finite_words
from vlmpack.training.checkpoint.folders import (
    COMPLETE,
    INDEX,
    MANIFEST,
    RANDOM,
    STATE,
    TEMPORARY_PREFIX,
    complete_text,
    find_damage,
    list_checkpoints,
    prune,
    sha256,
    step_folder,
    write_synced,
)
from vlmpack.training.checkpoint.index import StoredBox, TensorIndex
from vlmpack.training.checkpoint.safetensors_file import (
    FileDigest,
    HostCopies,
    TensorEntry,
    TensorWriter,
    dtype_name,
    write_tensors,
)
from vlmpack.whole_file import sync_folder

OwnedSlices = Callable[[], Iterable[tuple[Kind, TensorSlice, Tensor]]]
"""An engine's `owned_slices`; called twice, for the header and for the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank wrote, as it tells the main rank.

    Args:
        files: name -> size and hash.
        non_finite: tensors with a box that holds values that are not finite; see
            `non_finite_values`.
        error: why nothing was written; None if all was.
    """

    rank: int
    files: Mapping[str, FileDigest]
    boxes: Sequence[StoredBox]
    non_finite: NonFiniteValues = field(default_factory=dict)
    error: str | None = None


def write_rank_part(folder: Path, slices: OwnedSlices, *, rank: int, world_size: int) -> RankPart:
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
            file=_rank_file(kind, rank, world_size),
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
    non_finite = {
        key: values for writer in writers.values() for key, values in writer.non_finite.items()
    }
    return RankPart(rank=rank, files=files, boxes=boxes, non_finite=non_finite)


def _rank_file(kind: Kind, rank: int, world_size: int) -> str:
    stem = "model" if kind == "model" else "optimizer"
    return f"{stem}-{rank:05d}-of-{world_size:05d}.safetensors"


logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """The content of a checkpoint besides the values of parameters and moments.

    Args:
        step: optimizer steps of the run, holes included.
        state: JSON-able: data state, counters.
        random: generator states of the main rank, uint8.
        optimizer_steps: the engine's count; there are moments unless it is 0.
        spared: the best step for a run that resumes here; its checkpoint is kept. A background save
            is published later, when a better step's checkpoint may not exist yet, so this is not
            the best step at publication.
        dumped: steps that were not finite. The checkpoint before each is kept for a replay.
    """

    step: int
    state: Mapping[str, Any]
    random: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    optimizer_steps: int
    spared: int | None = None
    dumped: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Pending:
    folder: Path
    content: CheckpointContent
    part: Future[RankPart]


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Every rank makes the same calls in the same order.

    Args:
        keep: checkpoints to keep, at least 1.
        published: called on all ranks with the step and folder of each that is whole.
    """

    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        *,
        keep: int,
        published: Callable[[int, Path], None] | None = None,
    ) -> None:
        self.root = root
        self.ranks = ranks
        self.keep = keep
        self.published = published
        self._pending: _Pending | None = None
        self._copies: Future[list[tuple[Kind, TensorSlice, Tensor]]] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part is still being written in the background."""
        return self._pending is not None and not self._pending.part.done()

    def save(self, content: CheckpointContent, slices: OwnedSlices) -> None:
        """Write and publish a checkpoint, then remove all but the `keep` newest and the
        one that it spares. Collective.

        Raises:
            CheckpointError: on every rank, if any could not write its part, or the parts do not
                make a whole; older checkpoints are untouched.
            NonFiniteError: on every rank, likewise, if any has values that are no numbers.
        """
        self.finish()
        folder = self._start_folder(content.step)
        self._publish(folder, content, self._attempt(folder, slices))

    def save_in_background(self, content: CheckpointContent, slices: OwnedSlices) -> None:
        """Have a thread copy this rank's boxes, then write them. Collective.

        Nothing may change the values before `wait_for_copy`. What lies on a GPU is copied to the
        host at once, since a second thread's calls to CUDA could fall into the recording of a
        graph. The checkpoint is published by `finish`.

        Raises:
            CheckpointError: the folder cannot be made, or as `finish` for the save before.
            NonFiniteError: as `finish` for the save before.
        """
        self.finish()
        folder = self._start_folder(content.step)
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        try:
            held = [*slices()]
            copy: Callable[[Tensor], Tensor] = HostCopies().copy
            if any(value.is_cuda for _, _, value in held):
                held = [(kind, box, copy(value)) for kind, box, value in held]
                copy = Tensor.detach
        except Exception as error:  # told to all ranks by `finish`, as one of the thread is
            part = executor.submit(self._failure, error)
        else:
            self._copies = executor.submit(
                lambda: [(kind, box, copy(value)) for kind, box, value in held]
            )
            part = executor.submit(self._attempt, folder, self._copies.result)
        executor.shutdown(wait=False)  # the thread ends with its last task
        self._pending = _Pending(folder, content, part)

    def wait_for_copy(self) -> None:
        """Wait until the values of a background save may change. Not collective."""
        if self._copies is not None:
            with ACTIVITY.during("copying what a checkpoint will hold", ()):
                wait([self._copies])
            self._copies = None  # the thread alone has the copy now

    def finish(self) -> None:
        """Wait for the background save, if there is one, and publish it. Collective.

        Raises:
            CheckpointError, NonFiniteError: as `save`.
        """
        self.wait_for_copy()
        if self._pending is None:
            return
        ACTIVITY.enter("publishing a checkpoint")
        pending, self._pending = self._pending, None
        self._publish(pending.folder, pending.content, pending.part.result())

    def abandon(self) -> None:
        """Wait for this rank's thread and publish nothing; what it wrote is removed later."""
        self.wait_for_copy()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.part.exception()

    def _start_folder(self, step: int) -> Path:
        def make() -> Path:
            folder = self.root / f"{TEMPORARY_PREFIX}{step:08d}-{os.getpid()}"
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint of step {step} cannot be written: {error}"
                ) from error
            return folder

        return self.ranks.on_main(make)

    def _attempt(self, folder: Path, slices: OwnedSlices) -> RankPart:
        try:
            return write_rank_part(
                folder, slices, rank=self.ranks.rank, world_size=self.ranks.world_size
            )
        except Exception as error:  # told to all ranks, so that none waits for one that is gone
            return self._failure(error)

    def _failure(self, error: Exception) -> RankPart:
        logger.debug("this rank's part of a checkpoint failed", exc_info=error)
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if self.ranks.world_size > 1:
            text = f"rank {self.ranks.rank} on {socket.gethostname()}: {text}"
        return RankPart(rank=self.ranks.rank, files={}, boxes=(), error=text)

    def _publish(self, folder: Path, content: CheckpointContent, part: RankPart) -> None:
        parts = self.ranks.gather_objects(part)

        def publish() -> None:
            try:
                final = _publish_folder(self.root, folder, content, parts)
            except NonFiniteError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            except (OSError, CheckpointError) as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise CheckpointError(
                    f"checkpoint of step {content.step} cannot be written: {error}"
                ) from error
            problem = find_damage(final, hashed={name for s in parts for name in s.files})
            if problem is not None:
                raise CheckpointError(
                    f"checkpoint of step {content.step} does not verify after writing: {problem}"
                )
            best = content.spared
            spared = () if best is None else (step_folder(self.root, best).name,)
            before = [step_folder(self.root, step).name for step in content.dumped]
            prune(self.root, self.keep, newest=final, spared=spared, before=before)

        self.ranks.on_main(publish)
        if self.published is not None:
            self.published(content.step, step_folder(self.root, content.step))


def _publish_folder(
    root: Path, folder: Path, content: CheckpointContent, parts: Sequence[RankPart]
) -> Path:
    """Check the parts, write what the main rank writes, rename, and write COMPLETE."""
    errors = [part.error for part in parts if part.error is not None]
    if errors:
        raise CheckpointError("; ".join(errors))
    _refuse_non_finite(root, content.step, parts)
    files: dict[str, FileDigest] = {}
    for part in parts:
        for name, digest in part.files.items():
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{name}, written by rank {part.rank}, is not visible to rank 0: run_dir "
                    f"must lie on a file system that all machines share"
                )
            files[name] = digest
    index = TensorIndex.of(stored for part in parts for stored in part.boxes)
    problem = index.find_mismatch(content.shapes, optimizer_steps=content.optimizer_steps)
    if problem is not None:
        raise CheckpointError(problem)
    state = {
        **CHECKPOINT.mark(content.state),
        "step": content.step,
        "optimizer_steps": content.optimizer_steps,
    }
    files[RANDOM] = write_tensors(folder / RANDOM, content.random)
    files[INDEX] = write_synced(folder / INDEX, json.dumps(index.as_json()) + "\n")
    files[STATE] = write_synced(folder / STATE, json.dumps(state, indent=2, sort_keys=True) + "\n")
    manifest = {
        name: {"bytes": digest.num_bytes, "sha256": digest.sha256}
        for name, digest in sorted(files.items())
    }
    whole = write_synced(folder / MANIFEST, json.dumps({"files": manifest}, indent=2) + "\n")
    sync_folder(folder)
    final = step_folder(root, content.step)
    if final.exists():  # a damaged one of the same step: verified ones are never rewritten
        shutil.rmtree(final)
    folder.rename(final)
    sync_folder(root)
    write_synced(final / COMPLETE, complete_text(content.step, whole))
    sync_folder(final)
    return final


def _refuse_non_finite(root: Path, step: int, parts: Sequence[RankPart]) -> None:
    """Refuse weights that are no numbers, on which a resumed run would stop at once."""
    non_finite: dict[str, set[str]] = {}
    for part in parts:
        for key, values in part.non_finite.items():
            non_finite.setdefault(key.partition("@")[0], set()).update(values)
    if non_finite:
        names = [path.name for path in list_checkpoints(root)]
        raise NonFiniteError(
            f"step {step}: {non_finite_words(non_finite)}. This step is not saved or exported; "
            f"{f'{names[-1]} stays the newest checkpoint' if names else 'there is no checkpoint'}. "
            "Lower optim.lr, or set optim.max_grad_norm"
        )
