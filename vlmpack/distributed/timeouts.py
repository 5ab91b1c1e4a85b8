"""How long this process waits for the others in a collective: long at first, short in later steps.

torch takes a timeout when a group is made, and has one private function to change it afterwards,
for gloo and NCCL alike. It holds for what this process calls from then on, so no two processes have
to change it together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class CollectiveTimeouts:
    """Seconds.

    Args:
        first: of a launch and its first step, and of all that is not a step.
        later: of every later step.
    """

    first: float
    later: float

    @contextmanager
    def of_callbacks(self) -> Iterator[None]:
        """While the main rank runs a program's callbacks: one that uploads a checkpoint takes as
        long as it takes, and the watchdog says what is waited for."""
        set_timeout(max(self.first, DAY))
        try:
            yield
        finally:
            set_timeout(self.first)

    @contextmanager
    def of_step(self, *, is_first: bool) -> Iterator[None]:
        """A step of this launch."""
        if not is_first:
            set_timeout(self.later)
        try:
            yield
        finally:
            set_timeout(self.first)


def set_timeout(seconds: float) -> None:
    """Set the timeout of every group that this process is in, if it is in any."""
    timeout = timedelta(seconds=seconds)
    c10d = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)
