"""The plan: which samples make up each global batch. A pure function that never sees a rank.

This module plans splits whose samples are all known; `windows` plans shards that are indexed during
the run.

The inputs are the usable samples of each source, the seed, the epoch and the packing. They give
windows of at least 4096 samples, then global batches, then bins (`packers`). Any window can be
planned alone, so a run resumes from (epoch, window, batch). A second pure function, in `rank_bins`,
gives bins to ranks.

    order of a window   s s s s s s s s s s s s   (permuted; a part of every source)
    global batches      [ . . . . ] [ . . . . ] [ . . . . ]
    bins                [ . . ][ . . ]  micro_batch_size samples each, or filled to a token budget
    over 2 ranks        equally many each, filled up with empty bins

Randomness is Philox's raw bit stream, keyed by blake2b of its purpose. Permutations are a stable
argsort of it, so a plan does not depend on how numpy shuffles.

With `data.group_by: image` the samples of one image stand together:

    samples    a0 b0 a1 c0 b1 a2        groups by image: a, b, c
    shuffled   c0 a2 a0 a1 b0 b1        whole groups permuted, each in an order of its own

With `data.learn: each_answer` the samples of a group keep their order, so that each continues the
one before. A shuffle window, a global batch or a micro-batch cuts a group where its border falls. A
sample without images is a group of its own, and no group spans two sources.

An epoch's draws per source are whole numbers (largest remainder of weight x epoch), spread evenly
over the epoch. After any window, source d has given its part of the samples so far, off by less
than one. Window counts are `floor(window * rate)` plus a few left-over places. Those go by earliest
deadline, which is the schedule that keeps every source within one.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from heapq import heappop, heappush
from math import lcm
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlmpack.activity import ACTIVITY
from vlmpack.data.index.columns_file import Int64s, Numbers
from vlmpack.data.index.table_file import LARGE
from vlmpack.data.plan.order import OrderFile
from vlmpack.data.plan.packers import Bin, Packer


def draws_per_source(
    weights: Sequence[float], epoch_size: int, tokens_per_draw: Sequence[Fraction] | None = None
) -> tuple[int, ...]:
    """Samples that each source gives to one epoch: its quota, off by less than one.

    Args:
        weights: positive, of any scale; shares of the epoch's samples.
        epoch_size: samples in the epoch; the draws sum to it.
        tokens_per_draw: the mean of each source, above 0. If given, weights are shares of the
            epoch's tokens. A source with weight w and mean m is drawn in proportion to w / m.
    """
    # repr: 0.1 means one tenth here, not the binary fraction nearest to it.
    exact = [Fraction(repr(weight)) for weight in weights]
    if tokens_per_draw is not None:
        exact = [weight / mean for weight, mean in zip(exact, tokens_per_draw, strict=True)]
    # Whole parts of one unit. Sums of fractions would look for a divisor in every step.
    unit = lcm(*(weight.denominator for weight in exact))
    parts = [weight.numerator * (unit // weight.denominator) for weight in exact]
    total = sum(parts)
    quotas = [divmod(part * epoch_size, total) for part in parts]
    draws = [count for count, _ in quotas]
    order = sorted(range(len(draws)), key=lambda d: (-quotas[d][1], d))
    for d in order[: epoch_size - sum(draws)]:
        draws[d] += 1
    return tuple(draws)


def window_starts(draws: Sequence[int], window: int) -> npt.NDArray[np.int64]:
    """The draws of each source before each window of an epoch.

    Args:
        draws: per source, for the epoch.

    Returns:
        (W + 1, D) int64, for W windows and D sources: row w is the count before window w, the last
            row is `draws`. Rows sum to `min(w * window, epoch)`.
    """
    epoch = sum(draws)
    num_windows = -(-epoch // window) if epoch else 0
    starts = np.zeros((num_windows + 1, len(draws)), dtype=np.int64)
    if not num_windows:
        return starts
    rests = [window * count % epoch for count in draws]
    slots = sum(rests) // epoch
    period = epoch * slots
    waiting = [(0, d) for d, rest in enumerate(rests) if rest]
    due: list[tuple[int, int]] = []
    given = [0] * len(draws)
    for w in range(1, num_windows):
        # Source d is owed `rate = rests[d] / period` places a slot. Its next one may be taken from
        # slot `given / rate` on, and must be before `(given + 1) / rate`, its deadline. Deadlines
        # in whole slots make ties, which the order of sources decides.
        for slot in range((w - 1) * slots, w * slots):
            while waiting and waiting[0][0] <= slot:
                _, d = heappop(waiting)
                heappush(due, (-(-(given[d] + 1) * period // rests[d]), d))
            _, d = heappop(due)
            given[d] += 1
            heappush(waiting, (given[d] * period // rests[d], d))
        starts[w] = given
    whole = np.array([window * count // epoch for count in draws], dtype=np.int64)
    starts += np.arange(num_windows + 1)[:, None] * whole
    starts[num_windows] = draws
    return starts


PLAN_RULE = "plan-1"
"""Changes whenever the same inputs would give a different plan."""


def seeded_order(count: int, *labels: object) -> Int64s:
    """(count,) a permutation of 0 .. count - 1 that depends on the labels alone."""
    raw = np.asarray(np.random.Philox(key=_key(*labels)).random_raw(count), dtype=np.uint64)
    return np.argsort(raw, kind="stable")


def _key(*labels: object) -> int:
    text = "|".join([PLAN_RULE, *(str(label) for label in labels)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def grouped_order(
    numbers: Int64s, groups: Int64s, *labels: object, in_turn: bool = False
) -> Int64s:
    """(n,) a permutation of places that keeps the samples of each group together.

    Each draw of a sample that is drawn several times belongs to a unit of its own, so copies are
    not brought together.

    Args:
        labels: what else the order depends on.
        in_turn: whether the samples of a group stand in the order of their numbers.
    """
    names, group = np.unique(groups, return_inverse=True)
    unit_keys = _times_before(numbers) * names.shape[0] + group
    units, unit = np.unique(unit_keys, return_inverse=True)
    place_of_unit = seeded_order(units.shape[0], "groups", *labels)
    inside = numbers if in_turn else seeded_order(numbers.shape[0], "in groups", *labels)
    return np.lexsort((inside, place_of_unit[unit])).astype(np.int64)


def in_groups(groups: Int64s) -> Int64s:
    """(n,) a permutation that moves each group to the place of its first sample, and nothing
    else."""
    _, first, place = np.unique(groups, return_index=True, return_inverse=True)
    return np.argsort(first[place], kind="stable").astype(np.int64)


def _times_before(numbers: Int64s) -> Int64s:
    """(n,) how often each number came before."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if ordered.size else order
    counts = np.diff(np.r_[starts, ordered.size])
    times = np.empty_like(numbers)
    times[order] = np.arange(ordered.size) - np.repeat(starts, counts)
    return times


DRY_RUN_SAMPLES = 65_536

Shuffle = Literal["global", "window", "none"]

Cursor = int | tuple[int, int, int]
"""Where a source stands: its draws since the run began. With shards indexed during the run: (pass,
place in its shard order, usable samples of that shard)."""

Cursors = tuple[Cursor, ...]
"""One for each source; none where a plan does not need them."""

MANY_SOURCES = 64
"""States of more sources leave out what follows from the window, and shorten the rest."""


@dataclass(frozen=True, slots=True)
class PlanSource:
    """One source of a plan.

    Args:
        name: keys its permutation; moving the data does not change it.
        num_draws: samples it gives to an epoch; more than n means more than one pass.
    """

    name: str
    numbers: Numbers
    num_draws: int


@dataclass(frozen=True, slots=True)
class Position:
    """The next global batch: epoch, window in the epoch, batch in the window."""

    epoch: int = 0
    window: int = 0
    batch: int = 0

    def behind_window(self, *, ends_epoch: bool) -> Position:
        """The place of the first global batch behind this one's window."""
        return Position(self.epoch + 1) if ends_epoch else Position(self.epoch, self.window + 1)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One global batch.

    Args:
        following: where the next one stands.
        cursors: of the sources, before the window of `following`.
        shards: digest of the shards that `following` goes on in; None where the whole index is part
            of the identity.
    """

    position: Position
    following: Position
    bins: tuple[Bin, ...]
    cursors: Cursors
    shards: str | None = None

    @property
    def num_samples(self) -> int:
        """Samples in all bins."""
        return sum(len(samples) for samples in self.bins)


def cut_window(
    batches: Sequence[tuple[Bin, ...]],
    place: Position,
    after: Position,
    *,
    before: Cursors,
    behind: Cursors,
) -> list[PlannedBatch]:
    """A window's global batches with their places."""
    planned = []
    for b, bins in enumerate(batches):
        last = b + 1 == len(batches)
        following = after if last else Position(place.epoch, place.window, b + 1)
        cursors = behind if last else before
        planned.append(
            PlannedBatch(Position(place.epoch, place.window, b), following, bins, cursors)
        )
    return planned


class KnownPlan(ABC):
    """All global batches of a split whose samples are known. Any window is planned from its place
    alone."""

    @abstractmethod
    def windows(self, epoch: int) -> int:
        """Windows in an epoch."""

    @abstractmethod
    def window_steps(self, epoch: int) -> list[int]:
        """Global batches of each window of an epoch."""

    @abstractmethod
    def packed(self, start: Position, cursors: Cursors = ()) -> list[tuple[Bin, ...]]:
        """The bins of the global batches of one window."""

    def cursors(self, epoch: int, window: int) -> Cursors:
        """Where the sources stand before a window, as states have it."""
        return ()

    @property
    def num_windows(self) -> int:
        """Windows in the first epoch."""
        return self.windows(0)

    def first_epoch(self, num_windows: int | None = None) -> Iterator[list[tuple[Bin, ...]]]:
        """The bins of the global batches of each window of epoch 0."""
        windows = self.num_windows if num_windows is None else num_windows
        return (self.packed(Position(0, window)) for window in range(windows))

    def batches_of(self, epoch: int, window: int) -> list[PlannedBatch]:
        """The global batches of one window."""
        place = Position(epoch, window)
        after = place.behind_window(ends_epoch=window + 1 >= self.windows(epoch))
        return cut_window(
            self.packed(place),
            place,
            after,
            before=self.cursors(epoch, window),
            behind=self.cursors(after.epoch, after.window),
        )

    def num_steps(self, epoch: int) -> int:
        """Global batches in an epoch. Under a token budget this packs the rest of the epoch."""
        return sum(self.window_steps(epoch))

    def steps_until(self, epochs: int, start: Position, cursors: Cursors = ()) -> int:
        """Global batches from a position to the end of the last of `epochs` epochs."""
        if start.epoch >= epochs:
            return 0
        done = sum(self.window_steps(start.epoch)[: start.window]) + start.batch
        return sum(self.num_steps(epoch) for epoch in range(start.epoch, epochs)) - done

    def walk(
        self, start: Position, cursors: Cursors = (), shards: str | None = None
    ) -> Iterator[PlannedBatch]:
        """Global batches from a position on, without end. The plan must not be empty."""
        assert self.num_windows > 0
        position = start
        while True:
            batches = self.batches_of(position.epoch, position.window)
            ACTIVITY.worked()
            yield from batches[position.batch :]
            position = batches[-1].following


@dataclass(eq=False)
class Plan(KnownPlan):
    """All global batches of all epochs of one split.

    Args:
        shuffle: `global` permutes each source whole, `none` keeps the index's order.
        window: samples in a window.
        groups: (N,) of all samples of the split, equal for those that stand together. None if no
            samples do.
        in_turn: whether the samples of a group stand in the order of their numbers.
        folder: keeps the orders of large sources, where it can be written and groups are None.
    """

    sources: Sequence[PlanSource]
    _: KW_ONLY
    seed: int
    shuffle: Literal["global", "none"]
    window: int
    packer: Packer
    groups: Int64s | None = None
    in_turn: bool = False
    folder: Path | None = None

    def __post_init__(self) -> None:
        self._starts = window_starts([source.num_draws for source in self.sources], self.window)
        self._passes: dict[tuple[int, int], Int64s | OrderFile] = {}
        self._steps: dict[tuple[int, int], int] = {}

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        return int(self._starts[-1].sum())

    def cursors(self, epoch: int, window: int) -> Cursors:
        """See KnownPlan: what each source has given, counted from the run's first sample. Since it
        follows from the window, states of many sources do without."""
        if len(self.sources) > MANY_SOURCES:
            return ()
        return tuple(
            epoch * source.num_draws + int(self._starts[window, d])
            for d, source in enumerate(self.sources)
        )

    def windows(self, epoch: int) -> int:
        """See KnownPlan: as many in each epoch."""
        return int(self._starts.shape[0]) - 1

    def window_order(self, epoch: int, window: int) -> Int64s:
        """The sample numbers of one window, in order."""
        pieces = []
        for d, source in enumerate(self.sources):
            start = epoch * source.num_draws + int(self._starts[window, d])
            end = epoch * source.num_draws + int(self._starts[window + 1, d])
            pieces.append(self._draw(d, source, start, end))
        order = np.concatenate(pieces)
        if self.shuffle == "none":
            return order
        return order[self._shuffled(order, self.seed, "window", epoch, window)]

    def packed(self, start: Position, cursors: Cursors = ()) -> list[tuple[Bin, ...]]:
        """See KnownPlan."""
        batches = self.packer(self.window_order(start.epoch, start.window))
        self._steps[start.epoch, start.window] = len(batches)
        return batches

    def window_steps(self, epoch: int) -> list[int]:
        """See KnownPlan. Windows that were packed before are not packed again."""
        return [
            self._steps_of(epoch, window, count)
            for window, count in enumerate(np.diff(self._starts.sum(axis=1)).tolist())
        ]

    def _steps_of(self, epoch: int, window: int, count: int) -> int:
        steps = self.packer.num_batches(count)
        if steps is None:
            steps = self._steps.get((epoch, window))
        return len(self.packed(Position(epoch, window))) if steps is None else steps

    def _draw(self, d: int, source: PlanSource, start: int, end: int) -> Int64s:
        """Draws `start` to `end` of a source: pass after pass, each in its own order."""
        size = source.numbers.shape[0]
        pieces = [source.numbers[:0]]
        while start < end:
            number, place = divmod(start, size)
            places = slice(place, min(place + end - start, size))
            pieces.append(source.numbers[self._pass(d, source, number)[places]])
            start += places.stop - place
        return np.concatenate(pieces)

    def _pass(self, d: int, source: PlanSource, number: int) -> Int64s | OrderFile:
        """The order of one pass over a source. A few are cached, since a window needs two."""
        known = self._passes.get((d, number))
        if known is None:
            known = self._pass_order(source, number)
            for old in [place for place in self._passes if place[0] == d][:-1]:
                del self._passes[old]
            self._passes[d, number] = known
        return known

    def _pass_order(self, source: PlanSource, number: int) -> Int64s | OrderFile:
        count, labels = source.numbers.shape[0], ("global", self.seed, source.name, number)
        if count in self.filed and self.folder is not None:
            return OrderFile(self.folder, count, _key(*labels))
        if self.shuffle == "global":
            return self._shuffled(source.numbers[:], *labels)
        if self.groups is not None:
            return in_groups(self.groups[source.numbers[:]])
        return np.arange(count, dtype=np.int64)

    @property
    def filed(self) -> list[int]:
        """The samples of each source from LARGE on, whose orders lie in files."""
        alone = self.shuffle == "global" and self.groups is None
        counts = [source.numbers.shape[0] for source in self.sources]
        is_filed = alone and os.access(self.folder or "", os.W_OK)
        return [count for count in counts if is_filed and count >= LARGE]

    def _shuffled(self, numbers: Int64s, *labels: object) -> Int64s:
        """(n,) places of some samples in a seeded order, by whole groups where there are some."""
        if self.groups is None:
            return seeded_order(numbers.shape[0], *labels)
        return grouped_order(numbers, self.groups[numbers], *labels, in_turn=self.in_turn)


def dry_run_order(plan: Plan) -> Int64s:
    """(n,) the first samples of a plan in the order that a run packs them, at most
    DRY_RUN_SAMPLES."""
    dry = replace(plan, window=DRY_RUN_SAMPLES)
    return dry.window_order(0, 0) if dry.num_windows else np.empty(0, np.int64)
