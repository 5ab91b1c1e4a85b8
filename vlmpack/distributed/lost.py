"""Another process is gone: torch's error of a collective, as words of who and where.

A process that is killed says nothing. The others notice that a connection has closed, each in a
traceback of its own that names no rank; what they say instead is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exiting prematurely",  # NCCL's
)
"""What torch's backends say of a connection whose other end has gone away. A timeout is not among
them: its traceback says where this process stood."""


def lost_connection(error: BaseException) -> str | None:
    """The words in which a collective's error says that another process is gone; None for any other
    error."""
    if not isinstance(error, RuntimeError):
        return None
    return next((words for words in LOST if words in str(error)), None)


def words_of_lost(words: str, *, step: int, phase: str, size: int, ended: Sequence[str]) -> str:
    """What a process says that can go no further, in one line.

    Args:
        words: of `lost_connection`.
        step: that it was in; 0 before the first.
        phase: of it.
        size: of the world.
        ended: processes that are known to be gone.
    """
    where = f"step {step}, {phase}" if step else phase
    known = f": {'; '.join(ended)}" if ended else ""
    return (
        f"lost one of the {size} processes in {where} ({words}){known}. The first that ended has "
        "the cause: its own last words, or, where it was killed (by the kernel for memory, by a "
        "scheduler), its exit code or signal in what the launcher says. The same command resumes "
        "from the last checkpoint"
    )


def has_ended(pid: int) -> bool:
    """Whether a process of this machine is gone, its parent may have noticed or not; False where
    the kernel does not tell."""
    if not Path("/proc/self/stat").exists():
        return False
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"
