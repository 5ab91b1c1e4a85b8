"""The same work on many shards, in several processes or in this one."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, TypeVar

from vlmpack.activity import ACTIVITY
from vlmpack.data.forkserver import worker_context
from vlmpack.errors import VlmpackError
from vlmpack.terminal import say_printable
from vlmpack.watchdog import SECONDS, Watchdog

Item = TypeVar("Item")
Report = TypeVar("Report")

LOOK_SECONDS = 1.0
"""How often processes say that they moved, and the one that waits for them looks."""

AHEAD = 4
"""Shards that wait or are worked on, for each process."""


class Moves(Protocol):
    """A number that processes share."""

    value: int


def each_shard(
    work: Callable[[Item], Report],
    shards: Iterable[Item],
    *,
    processes: int,
    preload: tuple[str, ...],
    in_order: bool,
    remedy: str,
) -> Iterator[Report]:
    """A report of every shard. Where the caller stops early, no further shard is started. A process
    that another one started works alone.

    Args:
        shards: what it is called with; of an iterator, few are held at a time.
        processes: how many work at once; with fewer than 2 the calling one does.
        preload: modules for the processes to begin with.
        remedy: what to do where a process is killed.

    Raises:
        VlmpackError: a process was killed.
    """
    count = min(processes, len(shards)) if isinstance(shards, Sized) else processes
    if count < 2 or multiprocessing.parent_process() is not None:
        yield from map(work, shards)
        return
    context = worker_context(preload)
    moves: Moves = context.RawValue("L", 0)
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=_watch_process, initargs=(moves,)
    )
    try:
        running: list[Future[Report]] = []
        for shard in shards:
            running.append(pool.submit(_watched, work, shard))
            if len(running) == AHEAD * count:
                yield _taken(running, in_order, moves)
        while running:
            yield _taken(running, in_order, moves)
    except BrokenProcessPool as error:
        raise VlmpackError(
            f"one of the {count} processes that work on the shards was killed, most "
            f"likely because the machine ran out of memory: {remedy}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _watch_process(moves: Moves) -> None:
    """Start a process that reports the store it waits for, and its progress."""
    who = f"process {os.getpid()}, which works on shards"
    # It lives as long as the process, whose threads end with it.
    Watchdog(ACTIVITY, SECONDS, who=who, say=say_printable).__enter__()
    threading.Thread(target=_report_moves, args=(moves,), daemon=True).start()


def _report_moves(moves: Moves) -> None:
    """Overwriting another process's count is harmless, since any change counts as progress."""
    reported = ACTIVITY.beats
    while True:
        time.sleep(LOOK_SECONDS)
        if ACTIVITY.beats != reported:
            reported = ACTIVITY.beats
            moves.value += 1


def _watched(work: Callable[[Item], Report], shard: Item) -> Report:
    with ACTIVITY.during("working on a shard", ()):
        return work(shard)


def _taken(running: list[Future[Report]], in_order: bool, moves: Moves) -> Report:
    """The first report, or any finished one. Waiting counts as progress while processes move."""
    done, seen = set[Future[Report]](), moves.value
    waited_for = running[:1] if in_order else running
    with ACTIVITY.waiting(lambda: "waiting for the processes that work on shards"):
        while not done:
            done, _ = wait(waited_for, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
            if moves.value != seen:
                seen = moves.value
                ACTIVITY.moved()
    ACTIVITY.moved()
    future = next(one for one in running if one in done)
    running.remove(future)
    return future.result()
