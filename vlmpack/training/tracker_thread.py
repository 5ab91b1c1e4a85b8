"""An experiment tracker in a thread of its own: one that blocks keeps no run waiting.

The thread alone calls the tracker: it starts it, sends it one point after the other, and finishes
it. A point that finds too many others waiting is dropped and counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.addresses import without_secrets

logger = logging.getLogger("vlmpack")

MOST_WAITING = 1000
"""Points that a tracker may be behind."""
THREADS = "vlmpack-tracker-"
"""How the names of these threads begin."""


class TrackerThread:
    """One tracker, from its start to its end.

    Args:
        name: the tracker's.
        start: makes it and starts it; called in the thread.
    """

    def __init__(self, name: str, start: Callable[[], Any]) -> None:
        self.name = name
        self.off: str | None = None
        """Since when it has had no figures, and why; None while it works."""
        self.num_points = self.num_sent = 0
        self.doing = "start"
        """What it was called for last: start, log or finish."""
        self._start = start
        self._points: SimpleQueue[tuple[Mapping[str, float], int] | None] = SimpleQueue()
        self._started, self._given_up, self._said_full = Event(), False, False
        self._thread = Thread(target=self._run, name=f"{THREADS}{name}", daemon=True)
        self._thread.start()

    def started_by(self, deadline: float) -> bool:
        """Wait until it has started, or failed to; whether it has by then.

        Args:
            deadline: as `time.monotonic` counts.
        """
        with ACTIVITY.waiting(lambda: f"waiting for tracker {self.name} to start"):
            return self._started.wait(max(0.0, deadline - time.monotonic()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand a point over; waits for nothing."""
        if self.off is not None:
            return
        self.num_points += 1
        if self._points.qsize() < MOST_WAITING:
            self._points.put((values, step))
        elif not self._said_full:
            self._said_full = True
            logger.warning(
                "tracker %s is %d points behind, so points are dropped from step %d on",
                self.name,
                MOST_WAITING,
                step,
            )

    def end(self) -> None:
        """No point comes any more: it finishes after the last one."""
        self._points.put(None)

    def ended_by(self, deadline: float) -> bool:
        """Wait until it has ended; whether it has by then. If not, it is called no more.

        Args:
            deadline: as `time.monotonic` counts.
        """
        with ACTIVITY.waiting(lambda: f"waiting for tracker {self.name} to finish"):
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._given_up = self._thread.is_alive()
        return not self._given_up

    def missing(self) -> str:
        """How many points it was not sent, in words; empty where there are none."""
        lost = self.num_points - self.num_sent
        return f"it lacks {lost} of this launch's {self.num_points} points" if lost else ""

    def _run(self) -> None:
        step = 0
        try:
            tracker = self._start()
            self._started.set()
            while (point := self._points.get()) is not None and not self._given_up:
                (values, step), self.doing = point, "log"
                tracker.log(values, step=step)
                self.num_sent += 1
            if not self._given_up:
                self.doing = "finish"
                tracker.finish()
        except BaseException as error:  # its sys.exit too would only end this thread, in silence
            self._fail(step, without_secrets(str(error) or type(error).__name__))
        finally:
            self._started.set()

    def _fail(self, step: int, said: str) -> None:
        if self._given_up:  # its end was told
            return
        if self.doing == "finish":
            logger.warning("tracker %s did not finish: %s", self.name, said)
        elif self.doing == "log":
            self.off = f"from step {step} on ({said})"
            logger.warning("tracker %s failed and is off from here: %s", self.name, said)
        else:
            self.off = f"from the start ({said})"
            logger.warning(
                "tracker %s is off: %s (set logging.trackers to [] to silence this)",
                self.name,
                said,
            )
