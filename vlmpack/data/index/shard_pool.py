"""The same work on many shards, in several processes or in this one."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, Protocol, TypeVar

from vlmpack.activity import ACTIVITY
from vlmpack.data.forkserver import end_with, worker_context
from vlmpack.errors import VlmpackError
from vlmpack.terminal import say_printable
from vlmpack.watchdog import SECONDS, Watchdog

Item = TypeVar("Item")
Report = TypeVar("Report")

LOOK_SECONDS = 1.0
"""How often processes say that they moved, and the one that waits for them looks."""

AHEAD = 4
"""Shards that wait or are worked on, for each process; of many shards, so often several."""

FEWEST_TURNS = 128
"""Several shards are sent together where each process still gets so many of such groups."""
MOST_SENT = 16
"""The most of them."""


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
        work: each process gets it once, and keeps what it loads and opens.
        shards: what it is called with; of an iterator, few are held at a time.
        processes: how many work at once; with fewer than 2 the calling one does.
        preload: modules for the processes to begin with.
        remedy: what to do where a process is killed.

    Raises:
        VlmpackError: a process was killed.
    """
    num_shards = len(shards) if isinstance(shards, Sized) else processes
    count = min(processes, num_shards)
    if count < 2 or multiprocessing.parent_process() is not None:
        yield from map(work, shards)
        return
    context = worker_context(preload)
    moves: Moves = context.RawValue("L", 0)
    given = (moves, work, os.getpid())
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=_start_process, initargs=given
    )
    several = 1 if in_order else min(MOST_SENT, 1 + num_shards // (FEWEST_TURNS * count))
    try:
        running: list[Future[list[Report]]] = []
        left = iter(shards)
        while some := [*islice(left, several)]:
            running.append(pool.submit(_watched, some))
            if len(running) == AHEAD * count:
                yield from _taken(running, in_order, moves)
        while running:
            yield from _taken(running, in_order, moves)
    except BrokenProcessPool as error:
        raise VlmpackError(
            f"one of the {count} processes that work on the shards was killed, most "
            f"likely because the machine ran out of memory: {remedy}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_given: list[Callable[[Any], Any]] = []
"""The work of a process of a pool."""


def _start_process(moves: Moves, work: Callable[[Any], Any], parent: int) -> None:
    """Start a process that reports the store it waits for, and its progress."""
    end_with(parent)
    _given[:] = [work]
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


def _watched(shards: Sequence[Any]) -> list[Any]:
    with ACTIVITY.during("working on a shard", ()):
        return [_given[0](shard) for shard in shards]


def _taken(running: list[Future[list[Report]]], in_order: bool, moves: Moves) -> list[Report]:
    """The reports sent first, or any finished ones. Waiting counts as progress while processes
    move."""
    done, seen = set[Future[list[Report]]](), moves.value
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
