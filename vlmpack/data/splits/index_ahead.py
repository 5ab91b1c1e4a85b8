"""Processes that index shards before they are needed, beside the one that trains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from vlmpack.data.forkserver import signals_blocked, worker_context
from vlmpack.data.index.parts import BuildPart, BuildSettings, Part, build_unless_held
from vlmpack.errors import VlmpackError

CLOSE_SECONDS = 5.0
"""What helpers have to leave of themselves; one that waits for a store does not hear the signal."""


class IndexHelpers:
    """The helper processes of one split."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []

    def start(
        self,
        parts: Sequence[Part],
        build: BuildPart,
        settings: BuildSettings,
        *,
        share: int,
        shares: int,
    ) -> None:
        """Begins to make parts and returns.

        Args:
            parts: which.
            build: how one is made.
            settings: where they go, and what a process imports first.
            share, shares: which of the parts this process's helper begins with.
        """
        self._processes = [process for process in self._processes if process.is_alive()]
        arguments = (parts, build, replace(settings, progress=None), share, shares, os.getpid())
        with signals_blocked():
            process = worker_context(settings.preload).Process(  # type: ignore[attr-defined]
                target=_help, args=arguments, daemon=True
            )
            process.start()
        self._processes.append(process)

    def close(self) -> None:
        """Ends all, those by force that are still there after CLOSE_SECONDS."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []


def _help(
    parts: Sequence[Part],
    build: BuildPart,
    settings: BuildSettings,
    share: int,
    shares: int,
    trainer: int,
) -> None:
    """A helper's work. What it cannot do is done, or reported, by whoever needs the shard."""
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    Path(settings.directory).mkdir(parents=True, exist_ok=True)
    with suppress(KeyboardInterrupt):
        for place in sorted(range(len(parts)), key=lambda place: (place % shares != share, place)):
            try:
                os.kill(trainer, 0)
            except ProcessLookupError:  # it was killed, and nobody waits for the rest
                return
            with suppress(VlmpackError):
                build_unless_held(parts[place], build, "index")


def _leave(signum: int, frame: object) -> None:
    raise KeyboardInterrupt  # no fault of a source that is being read, as SystemExit would be
