"""A thread that says what its process waits for when nothing has moved for some time.

It looks four times in `seconds`, and speaks when the last change is three looks old. So it never
speaks later than `seconds` after that change, and repeats while nothing moves. The first report has
the main thread's stack. Where a C function blocks every Python thread, Python's faulthandler prints
the stacks instead. Time in which this thread did not run does not count, since the whole process
was stopped.
"""

from __future__ import annotations

import faulthandler
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from vlmpack.activity import IDLE, Activity

SECONDS = 60.0
"""The longest silence of a process, unless the recipe sets another."""
LOOKS = 4
FRAMES = 12
"""Innermost ones of a stack that are shown."""

Others = Callable[[], Sequence[str]]
"""What is known of other processes, a line each."""


class Silence:
    """For how long nothing has moved, in the time that the watchdog's thread ran."""

    def __init__(self, pause: float, started: float) -> None:
        self._pause = pause
        self._looked = started
        self._beats = -1
        self._quiet = 0.0

    def at(self, now: float, activity: Activity) -> float:
        """Seconds without a change, at this look."""
        passed, self._looked = now - self._looked, now
        lived = passed if passed < 2 * self._pause else self._pause
        if activity.beats == self._beats:
            self._quiet += lived
        else:
            self._beats, self._quiet = activity.beats, min(now - activity.since, lived)
        return self._quiet


@dataclass
class Watchdog:
    """Watches one process's activity; a context manager. Of several nested ones the innermost alone
    speaks.

    Args:
        seconds: the longest silence.
        others: what is known of other processes; called when nothing moves.
        last_resort: whether faulthandler speaks where this thread cannot; one in a process.
    """

    activity: Activity
    seconds: float
    _: KW_ONLY
    who: str
    say: Callable[[str], None]
    others: Others = tuple
    speaks: Callable[[], bool] = lambda: True
    last_resort: bool = False

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._outer: object = None
        self._thread = threading.Thread(target=self._run, name="vlmpack-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.activity.thread = threading.get_ident()
        self._outer, self.activity.watchdog = self.activity.watchdog, self
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.activity.watchdog = self._outer
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        said_of, said_at = -1, float("-inf")
        pause = self.seconds / LOOKS
        silence = Silence(pause, time.monotonic())
        with _last_resort(2 * self.seconds if self.last_resort else None) as look:
            look()  # else that of the watchdog outside would speak before the first pause is over
            while not self._stopped.wait(pause):
                if self.activity.watchdog is not self:
                    continue
                look()
                activity, now = self.activity, time.monotonic()
                beats, quiet = activity.beats, silence.at(now, activity)
                # A look comes a moment late, hence less than three whole pauses.
                if activity.phase == IDLE or min(quiet, now - said_at) < 2.8 * pause:
                    continue
                if not self.speaks():
                    continue
                self.say(self.report(quiet, stack=beats != said_of))
                said_of, said_at = beats, now

    def report(self, quiet: float, *, stack: bool) -> str:
        """What is known, a line each: the silence of `quiet` seconds and, with `stack`, the main
        thread's stack."""
        activity = self.activity
        step = f"step {activity.step}, " if activity.step else ""
        samples = f"; last samples: {activity.last_samples()}" if activity.samples else ""
        lines = [
            f"no progress for {quiet:.0f} s: {self.who}: {step}{activity.phase}{samples}",
            *activity.waits(),
            *self.others(),
        ]
        stands = activity.stack(FRAMES) if stack else ""
        if "<frozen importlib" in stands:
            lines.append("still importing Python packages (slow disk or busy CPU)")
        elif stack:
            lines.append(f"its main thread stands at\n{stands}")
        return "\n  ".join(lines)


def process_name(rank: int, world_size: int) -> str:
    """This process in words."""
    process = f"process {os.getpid()} on {socket.gethostname()}"
    return f"rank {rank} ({process})" if world_size > 1 else process


@contextmanager
def _last_resort(seconds: float | None) -> Iterator[Callable[[], None]]:
    """Yields a function to be called again before the seconds are over."""
    target = _real_stderr() if seconds is not None else None
    if target is None or seconds is None:
        yield lambda: None
        return
    try:
        yield lambda: faulthandler.dump_traceback_later(seconds, file=target)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _real_stderr() -> int | None:
    try:
        return None if sys.__stderr__ is None else sys.__stderr__.fileno()
    except (io.UnsupportedOperation, ValueError):
        return None
