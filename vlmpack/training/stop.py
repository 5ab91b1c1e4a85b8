"""SIGTERM -> a flag that the trainer reads at step boundaries. The first signal asks, the second
changes nothing: a checkpoint in progress is never interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Whether this process has been asked to stop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Ask for a stop at the next step boundary."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self._event.is_set()


@contextmanager
def stop_on_sigterm(flag: StopFlag) -> Iterator[None]:
    """Set `flag` on SIGTERM for the duration; a no-op outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_signal: int, _frame: FrameType | None) -> None:
        flag.set()

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
