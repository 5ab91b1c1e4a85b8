"""A source whose shards are indexed while the run goes on: pass after pass over its shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.batches import Cursor
from vlmpack.errors import EmptyDataError


@dataclass(frozen=True, slots=True)
class StreamSource:
    """One source of a plan by windows.

    Args:
        name: keys its orders; moving the data does not change it.
        first: number of its first shard in the split.
        shard_bytes: size of each of its shards, at least one.
        num_draws: samples it gives to an epoch; None where every sample is taken once.
    """

    name: str
    first: int
    shard_bytes: tuple[int, ...]
    num_draws: int | None

    @property
    def num_shards(self) -> int:
        """Shards of the source."""
        return len(self.shard_bytes)


class Shards(Protocol):
    """What the plan asks of the shards' index."""

    def numbers(self, shard: int) -> Int64s:
        """(n,) the usable samples of a shard in order; it is indexed first where it is not."""

    def count(self, shard: int) -> int | None:
        """How many they are, if that is known already."""

    def fingerprint(self, shard: int) -> bytes:
        """What tells its samples, as indexed and measured; as `numbers` it indexes the shard."""

    def next_window(self) -> None:
        """Told before a window is planned: what older ones used may be forgotten."""

    def make(self, shards: Sequence[int]) -> None:
        """Indexes shards that are needed now."""

    def make_ahead(self, shards: Sequence[int]) -> None:
        """Begins to index shards that will be needed next, or to fetch them where they are indexed,
        and returns."""


PassOrder = Callable[[StreamSource, int], Int64s]
"""(source, pass) -> its shards' numbers in the order of that pass."""


class Stream:
    """One source's samples from a cursor on.

    Args:
        source: the source.
        shards: their index.
        orders: the order of each pass.
        cursor: where to begin.
    """

    def __init__(
        self, source: StreamSource, shards: Shards, orders: PassOrder, cursor: Cursor
    ) -> None:
        self.source = source
        self.shards = shards
        self.orders = orders
        self.number, self.place, self.offset = as_place(cursor)
        self.taken: set[int] = set()
        """Shards that something was taken from."""

    @property
    def cursor(self) -> tuple[int, int, int]:
        """Where the stream stands."""
        return (self.number, self.place, self.offset)

    @property
    def exhausted(self) -> bool:
        """Whether nothing more comes: the pass is over, and it is the epoch's only one."""
        return self.source.num_draws is None and self.place == self.source.num_shards

    def has_more(self) -> bool:
        """Whether this pass has another sample; steps over shards without one to find out."""
        while not self.offset and self.place < self.source.num_shards:
            shard = int(self.orders(self.source, self.number)[self.place])
            known = self.shards.count(shard)
            if self.shards.numbers(shard).shape[0] if known is None else known:
                return True
            self.place += 1
        return self.offset > 0

    def take(self, count: int) -> list[Int64s]:
        """The next `count` samples, in pieces; fewer where the stream is exhausted."""
        pieces: list[Int64s] = []
        barren = 0
        while count and not self.exhausted:
            if self.place == self.source.num_shards:
                self.number, self.place = self.number + 1, 0
            order = self.orders(self.source, self.number)
            shard = int(order[self.place])
            numbers = self.shards.numbers(shard)
            self.taken.add(shard)
            piece = numbers[self.offset : self.offset + count]
            pieces.append(piece)
            count -= piece.shape[0]
            self.offset += piece.shape[0]
            if self.offset >= numbers.shape[0]:
                self.place, self.offset = self.place + 1, 0
            barren = 0 if numbers.shape[0] else barren + 1
            if barren > self.source.num_shards:
                raise EmptyDataError(
                    f"{self.source.name}: no usable sample in its {self.source.num_shards} shards"
                )
        return pieces


def as_place(cursor: Cursor) -> tuple[int, int, int]:
    """A cursor of this plan: (pass, place of the shard, samples of it taken)."""
    assert isinstance(cursor, tuple)
    return cursor
