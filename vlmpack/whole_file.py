"""Files that a reader sees whole or not at all, whenever their writer is killed; and files that
somebody named, opened to read."""

from __future__ import annotations

import errno
import io
import os
import socket
import stat
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


_OTHER_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def open_regular(path: str | Path, buffering: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """A file that somebody named, to read. Of a pipe or a device nobody knows when it has bytes,
    or whether it ends: it is an error, and never waited for.

    Args:
        path: of the file.
        buffering: bytes of the buffer.

    Raises:
        OSError: there is none, or it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        refuse_irregular(os.fstat(descriptor).st_mode, path)
        return io.BufferedReader(io.FileIO(descriptor), buffering)
    except BaseException:
        os.close(descriptor)
        raise


def regular_bytes(path: str | Path) -> bytes:
    """As `open_regular`: all bytes of a file."""
    with open_regular(path) as file:
        return file.read()


def regular_text(path: str | Path) -> str:
    """As `open_regular`: the text of a file in UTF-8, its line ends as `open` has them."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
        return file.read()


def refuse_irregular(mode: int, path: str | Path) -> None:
    """Raise OSError for what is no regular file.

    Args:
        mode: `st_mode` of its status.
        path: of it.
    """
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        found = _OTHER_KINDS.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"it is {found}; expected a regular file", str(path))
