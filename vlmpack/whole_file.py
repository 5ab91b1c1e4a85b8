"""Small files that readers see whole or not at all, whenever their writer is killed.

It also opens regular files for reading, reads JSON within bounds, and minds the umask.
"""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any, BinaryIO

MOST_DEPTH = 64
_MOST_INTEGER = 1 << 128
_KINDS = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a temporary file, flush it to the disk and rename it.

    Raises:
        OSError: disk full, and the like; the old file is kept.
    """
    with written_whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_whole(path: Path, *, flush: bool = True) -> Iterator[BinaryIO]:
    """A temporary file to write, which takes the name when the block ends without an error.

    Args:
        flush: to the disk first. False where what a power cut tears is found, and made again.

    Raises:
        OSError: disk full, and the like; the old file is kept.
    """
    writer = f"{socket.gethostname()}-{os.getpid()}-{get_ident()}"
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def not_world_writable() -> Iterator[None]:
    """Within it nobody but owner and group may write what is made, even under umask 0, as some
    containers have it. The rest of the umask is kept."""
    before = os.umask(0o077)
    os.umask(before | 0o002)
    try:
        yield
    finally:
        os.umask(before)


def share_as(like: Path, pattern: str) -> None:
    """Give the files of `pattern` the permissions of the file `like`, which follow the umask. The
    safetensors library writes its own for their owner alone."""
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
    """Open a named file to read. A pipe or a device is an error, since a read might wait for ever.

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
    """Raise OSError for what is no regular file."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _OTHER_KINDS.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}; expected a regular file", str(path))


def read_json(path: str | Path, kind: type = dict, *, any_number: bool = False) -> Any:
    """The value of a small JSON file.

    Args:
        kind: what it has to be; object for any.
        any_number: allow whole numbers of any size, where nobody computes with them.

    Raises:
        OSError: it cannot be read.
        ValueError: as `parse_small_json`.
    """
    return parse_small_json(regular_bytes(path), kind, any_number=any_number)


def parse_small_json(data: bytes | str, kind: type = dict, *, any_number: bool = False) -> Any:
    """A JSON value whose numbers and depth fit what is done with them later.

    Raises:
        ValueError: no UTF-8, no JSON, of another kind, nested too deeply, or with a whole number
            beyond 128 bits.
    """
    try:
        value = json.loads(data if isinstance(data, str) else data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, kind):
        expected = _KINDS.get(kind, kind.__name__)
        raise ValueError(f"it holds {_KINDS.get(type(value), repr(value))}; expected {expected}")
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [item for each in level if isinstance(each, list | dict) for item in _inside(each)]
        if not level:
            return value
        if not any_number and any(map(_is_huge, level)):
            raise ValueError("it holds a whole number of more than 128 bits")
    raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep")


def _inside(value: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and not -_MOST_INTEGER < value < _MOST_INTEGER
