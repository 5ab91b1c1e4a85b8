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
    """End the process at SIGINT with a line and exit code 130, while nothing is written yet.
    Foreign imports may swallow a KeyboardInterrupt or change it. A SIGINT that the process was
    started to ignore stays ignored."""
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
    os.write(sys.stderr.fileno(), b"interrupted before anything was started\n")
    os._exit(EXIT_CODE)
