"""SIGTERM, or a launcher that is gone -> a flag that the trainer reads at step boundaries.

Further signals change nothing, so a checkpoint in progress is never interrupted. SIGINT stops at
once, and logs what is saved.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from vlmpack.training.checkpoint import list_checkpoints
from vlmpack.training.metrics import read_rows
from vlmpack.training.run_dir import RunDir

logger = logging.getLogger("vlmpack")


class StopFlag:
    """Whether this process has been asked to stop, or torchrun, which started it, was killed: that
    asks nobody, and the processes would hold their devices and the run's folder to the last step.

    It is no threading.Event: a second signal during `set` would wait for ever for the event's lock,
    in the thread that holds it.
    """

    def __init__(self) -> None:
        self._asked = False
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def set(self) -> None:
        self._asked = True

    def is_set(self) -> bool:
        if self._launcher is not None and os.getppid() != self._launcher:
            logger.warning("torchrun has ended without its processes; they stop at this step")
            self._asked, self._launcher = True, None
        return self._asked


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], StopFlag]]:
    """Yields a function that makes SIGTERM set a flag until the end of the block.

    It works in the main thread alone. While an error leaves the block, SIGTERM does not interrupt
    the contexts that close: a launcher sends it to all ranks when one failed.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield lambda: flag
        return

    def handle(_signal: int, _frame: FrameType | None) -> None:
        flag.set()

    def listen() -> StopFlag:
        signal.signal(signal.SIGTERM, handle)
        return flag

    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield listen
    finally:
        if previous is not None:  # one that C has installed cannot be put back
            signal.signal(signal.SIGTERM, previous)


@contextmanager
def interrupt_logged(run_dir: RunDir) -> Iterator[None]:
    """Log where the run stands when a KeyboardInterrupt leaves the block; it is passed on."""
    try:
        yield
    except KeyboardInterrupt:
        logger.warning("%s", _interrupted(run_dir))
        raise


def _interrupted(run_dir: RunDir) -> str:
    step = max((row["step"] for row in read_rows(run_dir.metrics)), default=0)
    saved = list_checkpoints(run_dir.checkpoints)
    step_saved = int(saved[-1].name.removeprefix("step-")) if saved else 0
    last = f"the last checkpoint is step {step_saved}" if saved else "no checkpoint is saved yet"
    again = "resumes from it" if saved else "starts again"
    return (
        f"interrupted at step {step}; {last}, the same command {again}. "
        "SIGTERM saves one before it stops"
    )
