"""Where processes meet that torchrun has started again (`--max-restarts`).

torchrun's own store outlives a restart, and torch 2.13 no longer keeps apart what attempts write
there (older ones did): the new processes read the addresses of those that are gone, and cannot
connect. So each attempt after the first gets a part of the store of its own.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

STORE_SECONDS = 300
"""The longest wait for torchrun's store to answer."""


def attempt() -> int:
    """How often torchrun has started these processes again; 0 without it."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def part_of_attempt(store: Store) -> Store:
    """A store in which nothing of earlier attempts stands."""
    number = attempt()
    return PrefixStore(f"vlmpack/attempt-{number}", store) if number else store


def restarted_store(world_size: int) -> Store | None:
    """What the processes of a later attempt meet in; None where torch's own choice will do.

    Args:
        world_size: processes of the run.
    """
    if not attempt() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=STORE_SECONDS)
    store = TCPStore(host, port, world_size, is_master=False, timeout=wait)
    return part_of_attempt(store)
