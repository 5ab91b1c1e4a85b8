"""What this process is doing now: written where the work is done, read by its watchdog.

Writing is plain assignment, so its cost in a step cannot be measured. Each process has one
`ACTIVITY`. Passing it to every read of every store would put it into all pickled objects on the
way.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vlmpack.words import some_of

IDLE = "idle"
"""Waiting for orders, which may take for ever."""
MOST_KEYS = 3

Describe = Callable[[], str | None]
"""What is being waited for, in words; None where it is not waited for now."""


class Activity:
    """Phase, step and samples, since when, and what is waited for.

    `beats` counts changes. `stage` is the outermost phase; it began at `started`, and `alone` says
    that it has no samples. `thread` works and `watchdog` reports. `spent` has the seconds of the
    phases that have ended, by name.
    """

    __slots__ = (
        *("_entered", "_waits", "alone", "beats", "phase", "samples", "since", "spent", "started"),
        *("stage", "step", "thread", "watchdog"),
    )

    def __init__(self) -> None:
        self.phase = IDLE
        self.thread = threading.get_ident()
        self.step = 0
        self.samples: Sequence[str] = ()
        self.since = time.monotonic()
        self.beats = 0
        self.spent: dict[str, float] = {}
        self._entered = self.started = self.since
        self.stage, self.alone = IDLE, True
        self.watchdog: object = None
        self._waits: dict[int, Describe] = {}

    def enter(self, phase: str) -> None:
        """Something else begins, or the same once more."""
        self._switch(phase)
        self.stage, self.alone, self.started = phase, False, self.since

    def _switch(self, phase: str) -> None:
        before = self.phase
        self.phase = phase
        self.moved()
        self.spent[before] = self.spent.get(before, 0.0) + self.since - self._entered
        self._entered = self.since

    def enter_alone(self, phase: str, *, shown: bool = False) -> None:
        """Begin a phase without samples, so the step before is not named. `shown` phases have a
        progress bar."""
        self.samples = ()
        self.enter(phase)
        self.alone = True
        if shown:
            self.stage = IDLE

    def moved(self) -> None:
        """Note that the present work goes on."""
        self.since = time.monotonic()
        self.beats += 1

    def worked(self) -> None:
        """`moved`, where the thread that works says so: others may go on while it hangs."""
        if self.is_mine:
            self.moved()

    @property
    def is_mine(self) -> bool:
        """Whether the thread that asks is the one that works."""
        return threading.get_ident() == self.thread

    @contextmanager
    def during(self, phase: str, samples: Sequence[str]) -> Iterator[None]:
        """A phase inside another, to which it falls back."""
        before = self.phase
        self.samples = samples
        self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    @contextmanager
    def waiting(self, describe: Describe) -> Iterator[None]:
        """Something that may keep this process waiting, from whichever thread."""
        self._waits[id(describe)] = describe
        try:
            yield
        finally:
            del self._waits[id(describe)]

    def waits(self) -> list[str]:
        """The things that are waited for now."""
        described = (describe() for describe in list(self._waits.values()))
        return [text for text in described if text is not None]

    def last_samples(self) -> str:
        """The samples in words: the last ones that were worked on."""
        return some_of(self.samples, MOST_KEYS) or "none"

    def stack(self, frames: int) -> str:
        """Where the working thread stands, innermost last."""
        frame = sys._current_frames().get(self.thread)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-frames:]).rstrip()


ACTIVITY = Activity()
"""This process's."""
