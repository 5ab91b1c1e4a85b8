"""Checkpoints that are whole or not there.

    checkpoints/step-00000200/
      model.safetensors      parameters under transformers' names, float32
      optimizer.safetensors  exp_avg.<name> and exp_avg_sq.<name>
      random.safetensors     generator states
      state.json             step, data state, optimizer steps, counters
      manifest.json          size and SHA-256 of each file above
      COMPLETE               written last

A folder is built under a `.tmp-` name, every file is fsynced, then it is renamed, then COMPLETE is
written; only after that are older checkpoints removed. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlmpack.errors import CheckpointError

FORMAT_VERSION = 1
COMPLETE = "COMPLETE"
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped.

    Args:
        model: whole parameters, on CPU.
        optimizer: whole moments, on CPU.
        random: generator states, uint8.
        state: JSON-able: step, data state, counters.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    state: Mapping[str, Any]


def step_folder(root: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return root / f"step-{step:08d}"


def save_checkpoint(root: Path, step: int, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write one checkpoint atomically, verify it, then remove all but the `keep` newest.

    Args:
        root: the run's `checkpoints` folder.
        step: optimizer steps taken.
        checkpoint: its content.
        keep: checkpoints to keep, at least 1.

    Raises:
        CheckpointError: it could not be written (disk full, read-only), or does not verify; older
            ones are untouched.
    """
    final = step_folder(root, step)
    temporary = root / f".tmp-{final.name}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write_files(temporary, checkpoint)
        if final.exists():  # a damaged one of the same step: verified ones are never rewritten
            shutil.rmtree(final)
        temporary.rename(final)
        _fsync(root)
        _write_synced(final / COMPLETE, f"step {step}\n")
        _fsync(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {step} cannot be written: {error}") from error
    problem = find_damage(final)
    if problem is not None:
        raise CheckpointError(f"checkpoint of step {step} does not verify after writing: {problem}")
    _prune(root, keep, newest=final)
    return final


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    contents = (checkpoint.model, checkpoint.optimizer, checkpoint.random)
    for name, tensors in zip(TENSOR_FILES, contents, strict=True):
        path = folder / name
        save_file({key: value.contiguous() for key, value in tensors.items()}, str(path))
        _fsync(path)
    state = {"format_version": FORMAT_VERSION, **checkpoint.state}
    _write_synced(folder / "state.json", json.dumps(state, indent=2, sort_keys=True) + "\n")
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    _write_synced(folder / "manifest.json", json.dumps({"files": files}, indent=2) + "\n")
    _fsync(folder)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None if every byte is as it was written."""
    if not (folder / COMPLETE).is_file():
        return f"{COMPLETE} is missing: the save did not finish"
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        for name in (*TENSOR_FILES, "state.json"):
            if name not in files:
                return f"manifest.json does not list {name}"
        for name, expected in files.items():
            path = folder / Path(name).name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
            if _sha256(path) != expected["sha256"]:
                return f"{name} does not match its SHA-256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json is unreadable: {error}"
    return None


def list_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first, verified or not."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.name.startswith("step-"))


def newest_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and one line for each newer one that does not."""
    damaged: list[str] = []
    for folder in reversed(list_checkpoints(root)):
        problem = find_damage(folder)
        if problem is None:
            return folder, damaged
        damaged.append(f"{folder}: {problem}")
    return None, damaged


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint that `find_damage` has verified.

    Raises:
        CheckpointError: it is of another format version, or cannot be read.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = [load_file(str(folder / name)) for name in TENSOR_FILES]
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {state.get('format_version')}, this version reads "
            f"{FORMAT_VERSION}"
        )
    return Checkpoint(model=tensors[0], optimizer=tensors[1], random=tensors[2], state=state)


def random_state() -> dict[str, Tensor]:
    """States of torch's global generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Put the generators back; a state of a device that is not here is left alone."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _prune(root: Path, keep: int, *, newest: Path) -> None:
    """Keep `newest`, just verified, and the `keep - 1` before it. Later ones are of a past that
    was abandoned: a resume found them damaged."""
    found = list_checkpoints(root)
    older = [path for path in found if path.name < newest.name and (path / COMPLETE).is_file()]
    later = [path for path in found if path.name > newest.name]
    for folder in (*older[: len(older) - keep + 1], *later):
        (folder / COMPLETE).unlink(missing_ok=True)  # first: a half-removed one is never resumed
        shutil.rmtree(folder, ignore_errors=True)
    for leftover in root.glob(".tmp-step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
