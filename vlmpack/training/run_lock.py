"""The lock of a run folder: one run at a time, kept by the kernel, released by death.

    open run.lock -> flock -> is it still the file of that name? -> who wrote it last? -> write who

The holder deletes the file before it unlocks. A process that opened it just before sees that the
name is gone, or another file's, and tries again. The text in the file (process, host, start) is for
people. It counts as the lock only on a file system without locks.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from vlmpack.errors import RunDirError
from vlmpack.whole_file import parse_small_json

logger = logging.getLogger("vlmpack")

TURNS = 100
"""Each turn lost means that a holder has left between two calls."""
READ_SECONDS = 1.0
"""The longest wait for a holder that has locked the file to write who it is."""


class RunLock:
    """The lock of one run folder; taken and released by one process.

    Args:
        path: the lock's file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """Become the holder.

        Raises:
            RunDirError: another process holds it; the message names it. Or the file is another
                user's, or cannot be written.
        """
        try:
            self._take()
        except OSError as error:
            reason = "it is a link" if self.path.is_symlink() else error.strerror or error
            raise RunDirError(
                f"run_dir: {self.path} cannot be locked ({reason}); expected a "
                f"file that this user may write. If no run works there, delete it"
            ) from error

    def _take(self) -> None:
        for _ in range(TURNS):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                locked = self._locked(descriptor)
                if not self._is_named(descriptor):
                    os.close(descriptor)
                    continue
                self._refuse_unlocked_holder(descriptor)
                _write_owner(descriptor, locked)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            return
        raise RunDirError(f"run_dir: {self.path} keeps coming back; another process starts here")

    def release(self) -> None:
        """Delete the file, then release it; nothing if it is not held."""
        if self._descriptor is None:
            return
        if self._is_named(self._descriptor):
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(
                f"run_dir: {self.path.parent} is in use by {_holder(descriptor)}; wait for it, or "
                "choose another run_dir"
            ) from None
        except OSError as error:
            logger.warning(
                "run_dir: the file system of %s keeps no locks (%s): two runs that start here at "
                "the same moment are not kept apart",
                self.path.parent,
                error.strerror or error,
            )
            return False
        return True

    def _is_named(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.lstat())
        except FileNotFoundError:
            return False

    def _refuse_unlocked_holder(self, descriptor: int) -> None:
        owner = _owner(descriptor)
        if owner is None or owner.get("locked") is True:
            return  # the kernel gave us its lock, so its process is gone
        try:
            pid, host = int(str(owner["pid"])), str(owner["host"])
        except (KeyError, ValueError):
            return
        if host != socket.gethostname():
            raise RunDirError(
                f"run_dir: {self.path.parent} is in use by {_words(owner)}, which holds no lock "
                f"that this machine can see. If that process is gone, delete {self.path}"
            )
        if pid > 0 and pid != os.getpid() and _wrote(pid, os.fstat(descriptor).st_mtime):
            raise RunDirError(
                f"run_dir: {self.path.parent} is in use by {_words(owner)}; wait for it, or choose "
                "another run_dir"
            )


def _write_owner(descriptor: int, locked: bool) -> None:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "locked": locked,
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _owner(descriptor: int) -> Mapping[str, object] | None:
    try:
        owner: Mapping[str, object] = parse_small_json(os.pread(descriptor, 4096, 0))
    except ValueError:
        return None
    return owner


def _holder(descriptor: int) -> str:
    deadline = time.monotonic() + READ_SECONDS
    while time.monotonic() < deadline:
        owner = _owner(descriptor)
        if owner is not None and owner.get("locked") is True:
            return _words(owner)
        time.sleep(0.02)
    return "another process"


def _words(owner: Mapping[str, object]) -> str:
    since = f" since {owner['since']}" if "since" in owner else ""
    return f"process {owner.get('pid')} on {owner.get('host')}{since}"


def _wrote(pid: int, written: float) -> bool:
    """Whether the process that wrote the file still lives; a reused number does not count."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # or a number that no process can have
        return False
    except PermissionError:
        pass
    started = _started_at(pid)
    return started is None or started <= written + 1.0


def _started_at(pid: int) -> float | None:
    """A process's start in seconds since the epoch; None if the kernel does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        stat = Path("/proc/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    ticks = int(fields.rpartition(")")[2].split()[19])
    boot = next(int(line.split()[1]) for line in stat.splitlines() if line.startswith("btime"))
    return boot + ticks / os.sysconf("SC_CLK_TCK")
