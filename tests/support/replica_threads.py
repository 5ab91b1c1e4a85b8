"""The processes of a replica played by threads: what one says, all hear."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vlmpack.distributed import Ranks

Result = TypeVar("Result")


@dataclass
class Table:
    """Where they meet.

    Args:
        size: how many.
        seconds: the longest wait for the others.
    """

    size: int
    seconds: float = 60.0
    barrier: threading.Barrier = field(init=False)
    said: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=self.seconds)
        self.said = [None] * self.size

    def gather(self, rank: int, value: bytes) -> list[bytes]:
        """What all said."""
        self.said[rank] = value
        self.barrier.wait()
        found = [*self.said]
        self.barrier.wait()
        return found


@dataclass(frozen=True, kw_only=True)
class PlayedRanks(Ranks):
    """One of them; counts what it sends to each of the others.

    Args:
        table: where they meet.
        votes: bytes of each vote.
        told: bytes of all that was told beside.
    """

    table: Table
    votes: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    @property
    def ahead(self) -> PlayedRanks:
        """Itself: one iterator at a time here."""
        return self

    def gather_in_replica(self, values: Any) -> list[Any]:
        """See Ranks."""
        self.votes.append(values.numel() * values.element_size())
        return [pickle.loads(each) for each in self.table.gather(self.rank, pickle.dumps(values))]

    def gather_objects_in_replica(self, value: Any) -> list[Any]:
        """See Ranks."""
        data = pickle.dumps(value)
        self.told.append(len(data))
        return [pickle.loads(each) for each in self.table.gather(self.rank, data)]


def replica(size: int, *, stages: int = 1, seconds: float = 60.0) -> list[PlayedRanks]:
    """All processes of a replica.

    Args:
        size: how many.
        stages: PP.
        seconds: the longest wait for the others.
    """
    table = Table(size, seconds)
    return [
        PlayedRanks(
            rank=rank,
            world_size=size,
            replica_rank=rank,
            replica_size=size,
            stage_size=size // stages,
            table=table,
        )
        for rank in range(size)
    ]


def in_threads(
    all_ranks: list[PlayedRanks], work: Callable[[PlayedRanks], Result]
) -> list[Result | Exception]:
    """What each does, or raises."""

    def attempt(ranks: PlayedRanks) -> Result | Exception:
        try:
            return work(ranks)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(all_ranks)) as pool:
        return list(pool.map(attempt, all_ranks))
