"""The same work on many shards, in several processes or in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from vlmpack.data.forkserver import worker_context

Item = TypeVar("Item")
Report = TypeVar("Report")


def each_shard(
    work: Callable[[Item], Report],
    shards: Sequence[Item],
    *,
    processes: int,
    preload: tuple[str, ...],
    in_order: bool,
) -> Iterator[Report]:
    """A report of every shard. Where the caller stops early, shards not yet begun are left.

    Args:
        work: done on one shard; picklable.
        shards: what it is called with.
        processes: how many work at once; with 1 the calling one does.
        preload: modules for the processes to begin with.
        in_order: whether reports come in the order given, not as they finish.
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
    finally:
        pool.shutdown(cancel_futures=True)
