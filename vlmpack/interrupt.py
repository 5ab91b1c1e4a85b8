"""SIGINT while a command does nothing but import."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130


@contextmanager
def interrupt_ends_at_once() -> Iterator[None]:
    """End the process at SIGINT, with a line and exit code 130; only where nothing is written yet.

    Imports of others swallow a KeyboardInterrupt, or make another error of it. One that the
    process was started to ignore is ignored here too.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.stdout.flush()
    os.write(sys.stderr.fileno(), b"interrupted before anything was begun\n")
    os._exit(EXIT_CODE)
