"""Checkpoint folders: which there are, whether they are whole, and which are removed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vlmpack.errors import UNREADABLE
from vlmpack.file_format import CHECKPOINT, FORMAT
from vlmpack.model_folder.finite import non_finite_words, read_through
from vlmpack.training.checkpoint.index import TensorIndex
from vlmpack.training.checkpoint.safetensors_file import FileDigest
from vlmpack.whole_file import open_regular, parse_small_json, read_json, regular_bytes

COMPLETE = "COMPLETE"
INDEX, MANIFEST, RANDOM, STATE = "index.json", "manifest.json", "random.safetensors", "state.json"
TEMPORARY_PREFIX = ".tmp-step-"
_COMPLETE_TEXT = re.compile(rb"step [0-9]+ manifest\.json ([0-9a-f]{64})\n")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


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


def saved_data_state(root: Path) -> str | None:
    """The data state of the newest finished checkpoint where it verifies, as JSON text."""
    for folder in reversed(list_checkpoints(root)):
        if (folder / COMPLETE).is_file() and (text := data_state_of(folder)) is not None:
            return text
    return None


def data_state_of(folder: Path) -> str | None:
    """The data state of a checkpoint, as JSON text; None where it holds none that verifies."""
    try:
        text = read_verified(folder, STATE)["totals"]["data_state"]
    except UNREADABLE:
        return None
    return text if isinstance(text, str) else None


def complete_text(step: int, manifest: FileDigest) -> str:
    """The content of COMPLETE, which is the end of the chain of digests, in one line."""
    return f"step {step} {MANIFEST} {manifest.sha256}\n"


def _listed_files(folder: Path) -> Mapping[str, Any]:
    """The files that the manifest lists, if COMPLETE names that manifest."""
    data = regular_bytes(folder / MANIFEST)
    complete = regular_bytes(folder / COMPLETE)
    match = _COMPLETE_TEXT.fullmatch(complete)
    if match is None:
        unreleased = re.fullmatch(rb"step [0-9]+\n", complete) is not None
        raise ValueError(
            CHECKPOINT.refusal(None, folder) if unreleased else f"{COMPLETE} is damaged"
        )
    if hashlib.sha256(data).hexdigest() != match.group(1).decode():
        raise ValueError(f"{MANIFEST} does not match its SHA-256 in {COMPLETE}")
    files: Mapping[str, Any] = parse_small_json(data)["files"]
    return files


def read_verified(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint, from the bytes that its manifest describes.

    Raises:
        ValueError: they are not those that were written.
        OSError, KeyError, TypeError: as the manifest's reader does.
    """
    expected = _listed_files(folder)[name]["sha256"]
    data = regular_bytes(folder / name)
    if hashlib.sha256(data).hexdigest() != expected:
        raise ValueError(f"{name} does not match its SHA-256")
    content: dict[str, Any] = parse_small_json(data)
    return content


def find_damage(folder: Path, *, hashed: Collection[str] = ()) -> str | None:
    """The fault of a checkpoint folder. None if bytes are intact and values finite.

    In another format only the files of its manifest are checked.

    Args:
        hashed: files that their writers have just checked. Here only their sizes are checked.
    """
    if not (folder / COMPLETE).is_file():
        return f"{COMPLETE} is missing: the save did not finish"
    try:
        files = _listed_files(folder)
    except UNREADABLE as error:
        return f"{MANIFEST} is unreadable: {error}"
    try:
        for name, expected in files.items():
            path = folder / Path(name).name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
            if name in hashed:
                continue
            found, non_finite = read_through(path)
            if found != expected["sha256"]:
                return f"{name} does not match its SHA-256"
            if non_finite:
                return non_finite_words(non_finite)
    except UNREADABLE as error:
        return f"{MANIFEST} is unreadable: {error}"
    return _find_unlisted(folder, set(files))


def _find_unlisted(folder: Path, listed: set[str]) -> str | None:
    """A file that a checkpoint needs and its manifest does not list."""
    if STATE not in listed:
        return f"{MANIFEST} does not list {STATE}"
    try:
        if read_json(folder / STATE).get(FORMAT) != CHECKPOINT.number:
            return None  # intact; that it cannot be read is said where it is read
        for name in (INDEX, RANDOM):
            if name not in listed:
                return f"{MANIFEST} does not list {name}"
        for name in sorted(TensorIndex.from_json(read_json(folder / INDEX)).files() - listed):
            return f"{MANIFEST} does not list {name}"
    except UNREADABLE as error:
        return f"{STATE} or {INDEX} is unreadable: {error}"
    return None


def prune(
    root: Path,
    keep: int,
    *,
    newest: Path,
    spared: Collection[str] = (),
    before: Collection[str] = (),
) -> None:
    """Keep `newest`, just verified, and the `keep - 1` before it. Later ones were abandoned, since
    a resume found them damaged.

    Args:
        spared: names of folders that are kept too, however old.
        before: names of steps. The newest folder before each is kept too.
    """
    checkpoints = list_checkpoints(root)
    older = [
        path for path in checkpoints if path.name < newest.name and (path / COMPLETE).is_file()
    ]
    later = [path for path in checkpoints if path.name > newest.name]
    names = [path.name for path in (*older, newest)]
    kept = {*spared, *(max((n for n in names if n < step), default="") for step in before)}
    old = [path for path in older[: max(0, len(older) - keep + 1)] if path.name not in kept]
    for folder in (*old, *later):
        (folder / COMPLETE).unlink(missing_ok=True)  # first: a half-removed one is never resumed
        shutil.rmtree(folder, ignore_errors=True)
    for leftover in root.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_synced(path: Path, text: str) -> FileDigest:
    """Write a small text file and flush it to the disk."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
