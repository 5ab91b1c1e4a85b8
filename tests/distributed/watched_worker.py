"""Two ranks that work, then one that hangs, then one that is stopped, then one that comes too late.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... watched_worker.py SECONDS

Each says on stdout where it is, so that a test can stop it there.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from vlmpack.activity import ACTIVITY
from vlmpack.distributed import Ranks, start_process_group
from vlmpack.distributed.ranks import CollectiveTimeouts
from vlmpack.run.place import watched

LATER = 1.0


def say(text: str) -> None:
    """To the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def step(ranks: Ranks, number: int) -> None:
    """All ranks together."""
    ACTIVITY.step, ACTIVITY.samples = number, [f"sample-{number}-of-{ranks.rank}"]
    ACTIVITY.enter("forward and backward")
    ranks.sum_over_world(torch.ones(2))


def hangs(seconds: float) -> None:
    """Named by its stack."""
    ACTIVITY.enter("waiting for data")
    time.sleep(seconds)


def main() -> None:
    """What the module says."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    seconds = float(sys.argv[1])
    ranks = start_process_group(timeout_seconds=60)
    with watched(ranks, seconds):
        begun = time.monotonic()
        for number in range(1, 40):
            step(ranks, number)
            time.sleep(seconds / 20)
        say(f"worked {time.monotonic() - begun:.1f}")
        if ranks.rank == 1:
            hangs(5 * seconds)
        step(ranks, 40)
        say("hung")
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        step(ranks, 41)
        say("stopped")
    timeouts = CollectiveTimeouts(first=60, later=LATER)
    with timeouts.of_step(is_first=True):
        time.sleep(2 * LATER * ranks.rank)
        step(ranks, 42)
    begun = time.monotonic()
    try:
        with timeouts.of_step(is_first=False):
            time.sleep(8 * LATER * ranks.rank)
            step(ranks, 43)
    except RuntimeError:
        say(f"too late {time.monotonic() - begun:.1f}")
    if dist.is_initialized():
        os._exit(0)  # the groups are broken


if __name__ == "__main__":
    main()
