"""A thread that names what a process has been doing for two seconds.

It reads the process's activity: imports, then stages of a run or of a command. Each stage is named
once while it lasts. Those of optimizer steps repeat and have their own display, so they are named
only the first time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from vlmpack.activity import ACTIVITY, IDLE, Activity

logger = logging.getLogger("vlmpack")

SECONDS = 2.0
"""After which a stage is named."""
LOOKS = 8
"""In these seconds."""
STARTING = "starting: Python is importing what is needed"


class Waits:
    """Names stages of one process; a context manager."""

    def __init__(
        self, activity: Activity, say: Callable[[str], None], *, seconds: float = SECONDS
    ) -> None:
        self._activity, self._say, self._seconds = activity, say, seconds
        self._of_steps: set[str] = set()
        self._named = -1.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlmpack-waits", daemon=True)

    def __enter__(self) -> Waits:
        self._activity.enter(STARTING)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds / LOOKS):
            self._look()

    def _look(self) -> None:
        activity = self._activity
        stage, started, alone = activity.stage, activity.started, activity.alone
        if stage == IDLE or started == self._named or stage in self._of_steps:
            return
        if time.monotonic() - started < self._seconds:
            return
        self._named = started
        if not alone:
            self._of_steps.add(stage)
        self._say(stage)


def logged_waits() -> Waits:
    """This process's, said at INFO by the logger `vlmpack`."""
    return Waits(ACTIVITY, lambda what: logger.info("%-14s %s", "waiting", what))
