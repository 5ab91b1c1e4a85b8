"""The same work on many shards, in several processes or in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from vlmpack.data.forkserver import worker_context
from vlmpack.errors import VlmpackError

Item = TypeVar("Item")
Report = TypeVar("Report")


def each_shard(
    work: Callable[[Item], Report],
    shards: Sequence[Item],
    *,
    processes: int,
    preload: tuple[str, ...],
    in_order: bool,
    remedy: str,
) -> Iterator[Report]:
    """A report of every shard. Where the caller stops early, shards not yet begun are left.

    Args:
        work: done on one shard; picklable.
        shards: what it is called with.
        processes: how many work at once; with 1 the calling one does.
        preload: modules for the processes to begin with.
        in_order: whether reports come in the order given, not as they finish.
        remedy: what to do where a process is killed.

    Raises:
        VlmpackError: a process was killed.
    """
    count = min(processes, len(shards))
    if count < 2:
        yield from map(work, shards)
        return
    pool = ProcessPoolExecutor(count, mp_context=worker_context(preload))
    try:
        futures = [pool.submit(work, shard) for shard in shards]
        for future in futures if in_order else as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise VlmpackError(
            f"one of the {count} processes that work on the {len(shards)} shards was killed, most "
            f"likely because the machine ran out of memory: {remedy}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
