"""Files that a reader sees whole or not at all, whenever their writer is killed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from threading import get_ident


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file beside its place, flushes it to the disk and renames it.

    Raises:
        OSError: disk full, and the like; what was there before still is.
    """
    writer = f"{socket.gethostname()}-{os.getpid()}-{get_ident()}"
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def share_as(like: Path, pattern: str) -> None:
    """Give the files of a folder the permissions of one that was opened there as files are, by
    the umask: the safetensors library writes its own for their owner alone.

    Args:
        like: such a file, in the same folder.
        pattern: of the names of the others.
    """
    mode = like.stat().st_mode & 0o777
    for path in like.parent.glob(pattern):
        path.chmod(mode)


def sync_folder(path: Path) -> None:
    """Flushes a folder's entries to the disk: a renamed file outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
