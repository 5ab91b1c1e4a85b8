"""One voice for what all processes of a node refuse alike, before a process group joins them.

The first that refuses leaves a file behind, by its launcher and its words; another with the same
words in the next minute points at it. What one process alone has to say is in nobody else's words,
so it is always said.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

FRESH_SECONDS = 60
"""Processes of one launch refuse within so long of each other."""


def rank_that_said(text: str, rank: int) -> str | None:
    """Which other process of this node has just said so; None where this one is to say it.

    Args:
        text: of the error.
        rank: of this process.
    """
    launch = [str(os.getppid())]  # the launcher; a restart by it is another launch
    launch += [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    words = "\n".join([*launch, text])
    name = hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=16).hexdigest()
    try:
        return _claim(_own_folder() / name, rank)
    except OSError:
        return None


def _own_folder() -> Path:
    """This user's, which no other can write in; old files are removed from it.

    Raises:
        OSError: there is none, or it is somebody else's.
    """
    folder = Path(tempfile.gettempdir(), f"vlmpack-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")
    for path in folder.iterdir():
        if time.time() - path.lstat().st_mtime > FRESH_SECONDS:
            path.unlink(missing_ok=True)
    return folder


def _claim(path: Path, rank: int) -> str | None:
    try:
        with path.open("x", encoding="ascii") as file:
            file.write(str(rank))
        return None
    except FileExistsError:
        said = path.read_text(encoding="ascii") or "another one"  # which is about to write
    return None if said == str(rank) else said
