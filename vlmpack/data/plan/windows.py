"""The plan of a split whose shards are indexed while the run goes on: window by window.

A source is a stream of passes over its shards. Each pass has its own order of shards, and each
shard gives its usable samples in index order. A window takes the next samples of every stream by
its quota, and permutes them.

    shards of a pass     [ 3 ......... ][ 0 ...... ][ 7 ............ ][ 1 ....    (seeded order)
    windows              |      0      |      1      |      2      |
    cursor before 2                          (pass, place of shard 7 or 0, samples of it taken)

A window follows from the shard list, the seed, and the counts of the shards before it, whatever
else is indexed. Its cursors suffice to plan it without any earlier shard.

With weights the quotas are those of `batches`, exact to one sample. Without weights an epoch is one
pass over every source, whose lengths are not known yet. The sources then share a window by their
shards' bytes, and where one runs out the others fill its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import Protocol

import numpy as np

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.batches import (
    Cursor,
    Cursors,
    PlannedBatch,
    Position,
    cut_window,
    draws_per_source,
    grouped_order,
    seeded_order,
    window_starts,
)
from vlmpack.data.plan.packers import Bin, Packer
from vlmpack.errors import CheckpointError, EmptyDataError, RunIdentityError


@dataclass(frozen=True, slots=True)
class StreamSource:
    """One source of a plan by windows.

    Args:
        name: keys its orders; moving the data does not change it.
        first: number of its first shard in the split.
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
    """The interface of the shards' index for the plan."""

    def numbers(self, shard: int) -> Int64s:
        """(n,) the usable samples of a shard in order; it is indexed first where it is not."""

    def count(self, shard: int) -> int | None:
        """The number of its usable samples, if it is known already."""

    def fingerprint(self, shard: int) -> bytes:
        """A digest of its samples as indexed and measured. Like `numbers` it indexes the shard."""

    def next_window(self) -> None:
        """Called before a window is planned. Shards of older windows may be dropped."""

    def make(self, shards: Sequence[int]) -> None:
        """Indexes shards that are needed now."""

    def make_ahead(self, shards: Sequence[int]) -> None:
        """Start to index shards that are needed next, or to fetch those that are indexed, and
        return."""


PassOrder = Callable[[StreamSource, int], Int64s]
"""(source, pass) -> its shards' numbers in the order of that pass."""


@dataclass(eq=False)
class Stream:
    """One source's samples from a cursor on."""

    source: StreamSource
    shards: Shards
    orders: PassOrder
    start: InitVar[Cursor]

    def __post_init__(self, start: Cursor) -> None:
        self.number, self.place, self.offset = as_place(start)
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


WINDOW_RULE = "window-1"
"""Changes whenever the same shards would give another plan."""

PERIOD = 16
"""Windows after which the quotas by bytes repeat."""


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one window, permuted, with the cursors behind it and the shards it was taken
    from."""

    order: Int64s
    cursors: Cursors
    ended: bool
    shards: frozenset[int]


@dataclass(eq=False)
class WindowPlan:
    """All global batches of all epochs of one split, as far as its shards are known.

    Args:
        sources: all with `num_draws`, or none.
        spread: shards that are indexed at first, before any count is known; not part of the rule.
        groups: (n,) samples of a window, of one source -> (n,) their groups, or None.
        in_turn: whether samples of a group stand in the order of their numbers.
    """

    sources: Sequence[StreamSource]
    shards: Shards
    _: KW_ONLY
    seed: int
    window: int
    packer: Packer
    spread: int = 1
    key: str = "data.train"
    groups: Callable[[Int64s], Int64s | None] | None = None
    in_turn: bool = False

    def __post_init__(self) -> None:
        self._orders: dict[str, tuple[int, Int64s | None]] = {}
        draws = [source.num_draws for source in self.sources]
        self.weighted = None not in draws
        self._bytes = [max(1, sum(source.shard_bytes)) for source in self.sources]
        self._starts = window_starts(
            [count or 0 for count in draws]
            if self.weighted
            else draws_per_source(self._bytes, PERIOD * self.window),
            self.window,
        )

    def start(self, first_pass: int = 0) -> Cursors:
        """The cursors of a run's first window, or of an era's."""
        return tuple((first_pass, 0, 0) for _ in self.sources)

    def quotas(self, window: int) -> list[int]:
        """Samples that each source should give to a window of an epoch."""
        w = window if self.weighted else window % PERIOD
        return [int(count) for count in self._starts[w + 1] - self._starts[w]]

    def plan_window(self, epoch: int, window: int, cursors: Cursors) -> Window:
        """One window; indexes the shards that it needs and does not have.

        Raises:
            DataError: a shard that cannot be indexed, or a sample that may not be skipped.
            EmptyDataError: an epoch, or a source with weight, without a usable sample.
        """
        quotas = self.quotas(window)
        self.shards.next_window()
        self._make_likely(cursors, quotas)
        streams = [
            Stream(source, self.shards, self.shard_order, cursor)
            for source, cursor in zip(self.sources, cursors, strict=True)
        ]
        pieces: list[list[Int64s]] = [[] for _ in streams]
        draws = quotas
        while True:
            for stream, piece, count in zip(streams, pieces, draws, strict=True):
                piece += stream.take(count)
            missing = sum(quotas) - sum(part.shape[0] for piece in pieces for part in piece)
            open_ones = [d for d, stream in enumerate(streams) if not stream.exhausted]
            if not missing or not open_ones:
                break
            more = draws_per_source([self._bytes[d] for d in open_ones], missing)
            draws = [0] * len(streams)
            for d, count in zip(open_ones, more, strict=True):
                draws[d] = count
        if not window and sum(quotas) == missing:
            raise EmptyDataError(
                f"{self.key}: no usable sample in any of its "
                f"{sum(source.num_shards for source in self.sources)} shards: there is none, or "
                "all are longer than training.seq_length"
            )
        order = self._order(pieces, epoch, window)
        taken = frozenset(shard for stream in streams for shard in stream.taken)
        if self.weighted:
            behind = tuple(stream.cursor for stream in streams)
            return Window(order, behind, window + 2 == self._starts.shape[0], taken)
        # One that stands inside a shard has more, and no further shard is indexed to find out.
        if any(s.offset for s in streams) or any(s.has_more() for s in streams):
            return Window(order, tuple(stream.cursor for stream in streams), False, taken)
        return Window(order, self.start(streams[0].number + 1), True, taken)

    def _order(self, pieces: Sequence[Sequence[Int64s]], epoch: int, window: int) -> Int64s:
        """The samples of a window in its order, by whole groups where there are some."""
        of_sources = [np.concatenate([np.empty(0, np.int64), *piece]) for piece in pieces]
        joined = np.concatenate(of_sources)
        labels = (self.seed, "window", epoch, window)
        groups = [] if self.groups is None else list(map(self.groups, of_sources))
        if all(group is None for group in groups):
            return joined[seeded_order(joined.shape[0], *labels)]
        together = [
            numbers if group is None else group
            for numbers, group in zip(of_sources, groups, strict=True)
        ]
        groups_of_all = np.concatenate(together)
        return joined[grouped_order(joined, groups_of_all, *labels, in_turn=self.in_turn)]

    def packed(self, start: Position, cursors: Cursors) -> list[tuple[Bin, ...]]:
        """The bins of the global batches of one window."""
        return self.packer(self.plan_window(start.epoch, start.window, cursors).order)

    def steps_until(self, epochs: int, start: Position, cursors: Cursors) -> int:
        """Global batches from a position to the end of the last of `epochs` epochs. Plans every
        window until then, so it indexes every shard."""
        steps = -start.batch
        position = start
        while position.epoch < epochs:
            window = self.plan_window(position.epoch, position.window, cursors)
            closed = self.packer.num_batches(window.order.shape[0])
            steps += len(self.packer(window.order)) if closed is None else closed
            cursors = window.cursors
            position = position.behind_window(ends_epoch=window.ended)
        return max(0, steps)

    def walk(
        self, start: Position, cursors: Cursors, shards: str | None = None
    ) -> Iterator[PlannedBatch]:
        """Global batches from a position on, without end.

        Raises:
            EmptyDataError: an epoch without a usable sample.
            CheckpointError: the position and the cursors are not of such a plan.
            RunIdentityError: the shards that it goes on in are indexed as others.
        """
        self._check(start, cursors)
        position, is_first = start, True
        while True:
            window = self.plan_window(position.epoch, position.window, cursors)
            inside = self._digest(window.shards)
            if is_first:
                self._check_shards(shards, inside if start.batch else self._standing(cursors))
            after = position.behind_window(ends_epoch=window.ended)
            batches = cut_window(
                self.packer(window.order),
                Position(position.epoch, position.window),
                after,
                before=cursors,
                behind=window.cursors,
            )
            last = len(batches) - 1
            batches = [
                replace(batch, shards=inside if b < last else self._standing(window.cursors))
                for b, batch in enumerate(batches)
            ]
            if position.batch and position.batch >= len(batches):
                raise CheckpointError(
                    f"the data state stands before global batch {position.batch} of shuffle "
                    f"window {position.window}, which has {len(batches)}"
                )
            coming = batches[position.batch :]
            if is_first:  # nothing stands between a launch and its first batch
                yield from coming[:1]
                coming = coming[1:]
            likely = self._likely(window.cursors, self.quotas(after.window))
            self.shards.make_ahead(likely)
            yield from coming
            is_first = False
            position, cursors = after, window.cursors

    def shard_order(self, source: StreamSource, number: int) -> Int64s:
        """(S,) the split's shard numbers of a source in the order of one pass."""
        known, order = self._orders.get(source.name, (-1, None))
        if order is None or known != number:
            labels = ("shards", self.seed, source.name, number)
            order = source.first + seeded_order(source.num_shards, *labels)
            self._orders[source.name] = (number, order)
        return order

    def _standing(self, cursors: Cursors) -> str:
        """Digest of the shards of which a part was taken before a window."""
        places = zip(self.sources, map(as_place, cursors), strict=True)
        return self._digest(
            int(self.shard_order(source, number)[place])
            for source, (number, place, offset) in places
            if offset
        )

    def _digest(self, shards: Iterable[int]) -> str:
        prints = [b"%d %b" % (shard, self.shards.fingerprint(shard)) for shard in sorted(shards)]
        return hashlib.blake2b(b"|".join(prints), digest_size=8).hexdigest()

    def _check_shards(self, before: str | None, now: str) -> None:
        if before not in (None, now):
            raise RunIdentityError(
                f"{self.key}: the shards that this run stopped in now have other samples or "
                "lengths. Some would be lost or drawn twice. Go on with the version of vlmpack "
                "and the settings that indexed them, or start a new run folder"
            )

    def _make_likely(self, cursors: Cursors, quotas: Sequence[int]) -> None:
        """Index what the window needs by known counts, and repeat while new counts need more."""
        while missing := [
            shard for shard in self._likely(cursors, quotas) if self.shards.count(shard) is None
        ]:
            self.shards.make(missing)

    def _likely(self, cursors: Cursors, quotas: Sequence[int]) -> list[int]:
        """Shards that a window needs, by known counts and, for the others, by their bytes."""
        windows: list[tuple[int, int, int]] = []
        for d, (source, cursor, quota) in enumerate(
            zip(self.sources, cursors, quotas, strict=True)
        ):
            number, place, offset = as_place(cursor)
            remaining: float = quota + offset if quota else 0
            rate = self._samples_per_byte(source)
            order = self.shard_order(source, number)[place:] if remaining else ()
            for rank, shard in enumerate(order):
                windows.append((rank, d, int(shard)))
                known = self.shards.count(int(shard))
                if known is not None:
                    remaining -= known
                elif rate is not None:
                    remaining -= rate * source.shard_bytes[int(shard) - source.first]
                else:
                    remaining -= (quota + offset) / self.spread
                if remaining <= 0:
                    break
        return [shard for _, _, shard in sorted(windows)]

    def _samples_per_byte(self, source: StreamSource) -> float | None:
        """By the shards that are known; None where none is."""
        counts = [self.shards.count(source.first + s) for s in range(source.num_shards)]
        known = [s for s, count in enumerate(counts) if count is not None]
        total = sum(source.shard_bytes[s] for s in known)
        return sum(counts[s] or 0 for s in known) / total if total else None

    def _check(self, start: Position, cursors: Cursors) -> None:
        sound = len(cursors) == len(self.sources) and all(
            isinstance(cursor, tuple) and min(cursor) >= 0 and cursor[1] <= source.num_shards
            for source, cursor in zip(self.sources, cursors, strict=False)
        )
        if not sound or (self.weighted and start.window + 1 >= self._starts.shape[0]):
            raise CheckpointError(
                f"the data state has the cursors {list(cursors)} before window {start.window}, "
                f"which do not fit the {len(self.sources)} sources of this run"
            )
