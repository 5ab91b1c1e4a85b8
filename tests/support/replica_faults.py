"""Run in ranks: `vlmpack finetune` on several processes, one of which meets a fault.

    FAULT=killed torchrun --nproc-per-node N replica_faults.py RECIPE

FAULT is a name of `FAULTS`, or nothing, HIT the rank. It comes in the third step, or in reading
what that step trains.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from vlmpack.cli.app import main
from vlmpack.data.loading.loader import BinDataset
from vlmpack.training.step import Stepper

STEP = 3
MICRO_BATCHES = 2
FAILURE = "the disk of one machine is gone"


def at_step(of: type, name: str, fault: Callable[[], None]) -> None:
    """Before the first call that belongs to the third step."""
    original, calls = getattr(of, name), []
    due = 1 + (STEP - 1) * (1 if of is Stepper else MICRO_BATCHES)

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == due:
            fault()
        return original(self, *args, **options)

    setattr(of, name, counted)


def killed() -> None:
    """While it trains."""
    at_step(Stepper, "train", lambda: os.kill(os.getpid(), signal.SIGKILL))


def killed_reading() -> None:
    """While it reads what it will vote for."""
    at_step(BinDataset, "read", lambda: os.kill(os.getpid(), signal.SIGKILL))


def asked_to_stop() -> None:
    """By SIGTERM, while it trains and the next step's vote is under way."""
    at_step(Stepper, "train", lambda: os.kill(os.getpid(), signal.SIGTERM))


def stopped() -> None:
    """It hangs: its connections stay open."""
    at_step(BinDataset, "read", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def lost_shard() -> None:
    """It alone can no longer read."""

    def lost() -> None:
        raise OSError(FAILURE)

    at_step(BinDataset, "read", lost)


def not_a_number(kind: str) -> None:
    """What it holds of one tensor is spoilt by the third step."""
    original = Stepper.train

    def spoiling(self: Any, step: int, *args: Any, **options: Any) -> Any:
        found = original(self, step, *args, **options)
        if step + 1 == STEP:
            owned = self.engine.owned_slices()
            next(value for of, _, value in owned if of == kind and value.numel()).fill_(math.nan)
        return found

    Stepper.train = spoiling  # type: ignore[method-assign]


FAULTS = {
    "killed": killed,
    "killed reading": killed_reading,
    "asked to stop": asked_to_stop,
    "stopped": stopped,
    "lost shard": lost_shard,
    "not a number": partial(not_a_number, "model"),
    "moment not a number": partial(not_a_number, "exp_avg_sq"),
}


def is_hit() -> bool:
    """Whether it is this process."""
    return int(os.environ["RANK"]) == int(os.environ["HIT"])


if __name__ == "__main__":
    if os.environ.get("FAULT") and is_hit():
        FAULTS[os.environ["FAULT"]]()
    sys.argv[1:] = ["finetune", *sys.argv[1:]]
    main()
