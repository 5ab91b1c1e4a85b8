"""Worker processes that inherit nothing but imported modules.

They fork from a small server that has only imported `preload`. So they start quickly, and no
client, lock or thread of the training process reaches them.
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
