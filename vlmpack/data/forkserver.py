"""Worker processes that inherit nothing but imported modules.

They fork from a small server that has only imported `preload`. So they start quickly, and no
client, lock or thread of the training process reaches them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import cast

DEFAULT_PRELOAD = ("torch", "vlmpack.data.loading.loader")

PARENT_CHECK_SECONDS = 2.0

_FIRST = "vlmpack.data.server_memory"
"""Preloaded before anything else."""


def worker_context(preload: tuple[str, ...] = DEFAULT_PRELOAD) -> BaseContext:
    """The forkserver context; the first call in a process decides what is preloaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_FIRST, *preload])
    return cast(BaseContext, context)


def start_server(preload: tuple[str, ...] = DEFAULT_PRELOAD) -> None:
    """Start the server without waiting for its imports. The first process that it forks waits for
    them."""
    worker_context(preload)
    with signals_blocked():
        forkserver.ensure_running()


def end_with(parent: int) -> None:
    """Have this worker end if the process that it works for was killed.

    Its parent is the server, which lives as long as a worker, so both would stay for ever.

    Args:
        parent: the number of that process.
    """
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while True:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(PARENT_CHECK_SECONDS)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGTERM and SIGINT in the processes that are started here, by an inherited mask.

    A launcher or terminal signals the whole process group. At SIGTERM the training process takes
    one more step and saves, which still needs its workers. At SIGINT workers would only print
    tracebacks.
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
