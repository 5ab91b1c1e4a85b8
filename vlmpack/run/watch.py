"""The watchdog of a rank of a training run: its own activity, and the others' through the store."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vlmpack.activity import ACTIVITY, IDLE
from vlmpack.distributed import Ranks
from vlmpack.distributed.pulse import Pulse, pulse_store
from vlmpack.terminal import say_printable
from vlmpack.watchdog import Watchdog


@contextmanager
def watched(ranks: Ranks, seconds: float) -> Iterator[None]:
    """Nothing that this process waits for keeps it silent for longer than `seconds`.

    Args:
        ranks: who this process is.
        seconds: `logging.watch_seconds`.
    """
    ACTIVITY.step, ACTIVITY.samples = 0, ()
    ACTIVITY.enter("launch")
    process = f"process {os.getpid()} on {socket.gethostname()}"
    who = f"rank {ranks.rank} ({process})" if ranks.world_size > 1 else process
    with ExitStack() as stack:
        pulse = _pulse(ranks, seconds)
        if pulse is None:
            watchdog = Watchdog(ACTIVITY, seconds, who=who, say=_say, last_resort=True)
        else:
            stack.enter_context(pulse)
            watchdog = Watchdog(
                ACTIVITY,
                seconds,
                who=who,
                say=_say,
                others=pulse.lines,
                speaks=pulse.speaks,
                last_resort=True,
            )
        stack.enter_context(watchdog)
        try:
            yield
        finally:
            ACTIVITY.enter(IDLE)


def _pulse(ranks: Ranks, seconds: float) -> Pulse | None:
    store = pulse_store() if ranks.world_size > 1 else None
    if store is None:
        return None
    return Pulse(
        ACTIVITY, rank=ranks.rank, world_size=ranks.world_size, seconds=seconds, store=store
    )


def _say(text: str) -> None:
    # Other ranks than the first show errors alone; one of them speaks when the first cannot.
    say_printable(text, logging.ERROR)
