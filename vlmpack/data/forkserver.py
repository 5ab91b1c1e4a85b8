"""Worker processes that inherit nothing but imported modules.

They fork from a small server that was started fresh and has only imported `preload`: no open
client, no lock, no thread of the training process reaches them, and their start is quick.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import cast

DEFAULT_PRELOAD = ("torch", "vlmpack.data.loading.loader")


def worker_context(preload: tuple[str, ...] = DEFAULT_PRELOAD) -> BaseContext:
    """The forkserver context; the first call in a process decides what is preloaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return cast(BaseContext, context)


def start_server(preload: tuple[str, ...] = DEFAULT_PRELOAD) -> None:
    """Starts the server and returns; it imports while this process goes on.

    The first process that is asked of it waits until it has.
    """
    worker_context(preload)
    with signals_blocked():
        forkserver.ensure_running()


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Start processes here, and neither SIGTERM nor SIGINT reaches them: they inherit the mask.

    A launcher and a terminal signal the whole process group. At SIGTERM the training process takes
    one more step and saves, for which it still needs its workers; at SIGINT it says what is saved,
    and they would print where their imports were. They end with it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python's resource tracker unblocks both where it starts, so it has to be there before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
