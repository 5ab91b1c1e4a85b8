"""Where the processes of a run meet under torchrun, however often each of them was started.

torchrun's store outlives processes, and in torch 2.13 new processes read the addresses of old ones.
An agent's restart count does not help across nodes, since a replaced agent counts anew. So each
start agrees on a new name, and its processes meet below that name:

    others   write a token, wait for an answer to it, and confirm it
    first    answers all open tokens with one name; once every process has confirmed it, says go.
             If a process is missing or was replaced meanwhile, it starts again

An old process's token was answered before, or is replaced by the next process's token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from vlmpack.activity import ACTIVITY
from vlmpack.errors import VlmpackError

KEY = "vlmpack/meeting"
PATIENCE = 20.0
"""Seconds that the first process waits for those that it has answered; the others twice as long."""
PAUSE = 0.05
"""Seconds between two looks."""
LONGEST = 1800.0
"""Default seconds that processes wait for each other."""


def meeting_store(rank: int, world_size: int, *, seconds: float | None) -> Store | None:
    """The store in which the processes of a start meet. None if torch's own choice will do.
    Collective.

    Args:
        seconds: the longest wait for the others; None for `LONGEST`.

    Raises:
        VlmpackError: not all of them came.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    longest = LONGEST if seconds is None else seconds
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=longest)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
    with ACTIVITY.during("waiting for the run's other processes to start", ()):
        name = agreed_name(store, rank, world_size, seconds=longest)
    return PrefixStore(f"{KEY}/{name}", store)


def agreed_name(store: Store, rank: int, world_size: int, *, seconds: float) -> str:
    """A name that the processes of this start have, and none of an earlier one. Collective.

    Args:
        store: that all of them see, and those of earlier starts saw.

    Raises:
        VlmpackError: not all of them came.
    """
    deadline = time.monotonic() + seconds
    while True:
        name = _lead(store, world_size, deadline) if rank == 0 else _follow(store, rank, deadline)
        if name is not None:
            return name


def _lead(store: Store, world_size: int, deadline: float) -> str | None:
    """The agreed name once all processes have it; None if one does not confirm."""
    name, others = uuid4().hex, range(1, world_size)
    tokens = {rank: _token(store, rank, others, deadline) for rank in others}
    for token in tokens.values():
        store.set(f"{KEY}/answer/{token}", name)
    there = [f"{KEY}/{name}/{rank}" for rank in others]
    if not _comes(lambda: _all_there(store, there), time.monotonic() + PATIENCE):
        return None
    store.set(f"{KEY}/{name}/go", name)
    return name


def _token(store: Store, rank: int, others: Iterable[int], deadline: float) -> str:
    """Wait for the token of a process that has no answer yet."""
    lines: list[str] = []

    def is_there() -> bool:
        if not store.check([f"{KEY}/token/{rank}"]):
            return False
        lines[:] = [store.get(f"{KEY}/token/{rank}").decode()]
        return not store.check([f"{KEY}/answer/{lines[0]}"])

    if _comes(is_there, deadline):
        return lines[0]
    missing = [other for other in others if not store.check([f"{KEY}/token/{other}"])]
    named = f"rank {', '.join(map(str, missing[:8]))}" if missing else f"rank {rank} of this start"
    raise VlmpackError(
        f"{named} did not come within parallelism.timeout_seconds. Expected all processes of the "
        "run: is torchrun started on every node, with the same number of nodes and processes?"
    )


def _follow(store: Store, rank: int, deadline: float) -> str | None:
    """The name that the first process answers with; None if it does not confirm it."""
    token = uuid4().hex
    store.set(f"{KEY}/token/{rank}", token)
    answer = f"{KEY}/answer/{token}"
    if not _comes(lambda: store.check([answer]), deadline):
        raise VlmpackError(
            "rank 0 did not come within parallelism.timeout_seconds. Expected it where "
            "torchrun's --master-addr or --rdzv-endpoint says"
        )
    name: str = store.get(answer).decode()
    store.set(f"{KEY}/{name}/{rank}", token)
    soon = min(deadline, time.monotonic() + 2 * PATIENCE)
    return name if _comes(lambda: store.check([f"{KEY}/{name}/go"]), soon) else None


def _all_there(store: Store, keys: list[str]) -> bool:
    return not keys or bool(store.check(keys))


def _comes(is_so: Callable[[], bool], deadline: float) -> bool:
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)
    return True
