"""The global batches of saved packs: whole packs, in an order of each epoch's own.

Epoch 0 of packs that reproduce an online plan has that plan's global batches, as long as seed and
global batch are those it was made for. Every other epoch permutes the packs, by (seed, epoch);
which samples share one stays. A window is a stretch of packs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.batches import (
    Cursors,
    PlannedBatch,
    PlanSource,
    Position,
    cut_window,
    seeded_order,
)
from vlmpack.data.plan.packers import BATCHES_PER_WINDOW, Bin, BudgetPacker

PACK_RULE = "packs-1"
"""Changes whenever the same packs would come in another order."""


@dataclass(frozen=True, slots=True)
class PackArrays:
    """The packs of an epoch.

    Args:
        numbers: (n,) sample numbers, pack after pack.
        starts: (P + 1,) where each pack begins in `numbers`.
        batches: (B + 1,) packs before each global batch of the online plan; empty under `bfd`.
        windows: (W + 1,) global batches before each window of it; empty under `bfd`.
    """

    numbers: Int64s
    starts: Int64s
    batches: Int64s
    windows: Int64s

    @property
    def num_packs(self) -> int:
        """P, the number of packs."""
        return int(self.starts.shape[0]) - 1

    def members(self, pack: int) -> Bin:
        """The samples of a pack, in row order."""
        members: list[int] = self.numbers[self.starts[pack] : self.starts[pack + 1]].tolist()
        return tuple(members)

    def to_mapping(self) -> dict[str, Int64s]:
        """The arrays by the names of their fields."""
        names = ("numbers", "starts", "batches", "windows")
        return {name: getattr(self, name) for name in names}

    @property
    def fingerprint(self) -> str:
        """What tells who shares a pack, and in which order."""
        found = hashlib.blake2b(digest_size=16)
        for array in self.to_mapping().values():
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    @classmethod
    def of(cls, windows: Sequence[Sequence[Sequence[Bin]]]) -> PackArrays:
        """From the packs of the global batches of each window."""
        batches = [batch for window in windows for batch in window]
        packs = [pack for batch in batches for pack in batch]
        return cls(
            numbers=np.fromiter((n for pack in packs for n in pack), np.int64),
            starts=_starts([len(pack) for pack in packs]),
            batches=_starts([len(batch) for batch in batches]),
            windows=_starts([len(window) for window in windows]),
        )

    @classmethod
    def unordered(cls, packs: Sequence[Int64s]) -> PackArrays:
        """From packs that no global batch has an order for."""
        none = np.zeros(0, np.int64)
        numbers = np.concatenate(packs) if packs else none
        return cls(numbers, _starts([len(pack) for pack in packs]), none, none)


class PackPlan:
    """All global batches of all epochs of saved packs.

    Args:
        arrays: the packs.
        sources: of the samples, with their draws per epoch.
        seed: of the order.
        packer: says what a pack holds at most and how many a global batch has; nothing is packed.
        keeps_order: whether the first epoch takes the packs in the order and the global batches
            that they were saved with.
    """

    def __init__(
        self,
        arrays: PackArrays,
        *,
        sources: Sequence[PlanSource],
        seed: int,
        packer: BudgetPacker,
        keeps_order: bool,
    ) -> None:
        self.arrays = arrays
        self.sources = tuple(sources)
        self.seed = seed
        self.packer = packer
        self.keeps_order = keeps_order
        self._order: tuple[int, Int64s] | None = None

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        return int(self.arrays.numbers.shape[0])

    def windows(self, epoch: int) -> int:
        """Windows in an epoch."""
        if self._is_saved(epoch):
            return int(self.arrays.windows.shape[0]) - 1
        return -(-self.num_steps(epoch) // BATCHES_PER_WINDOW)

    @property
    def num_windows(self) -> int:
        """Windows in the first epoch."""
        return self.windows(0)

    def num_steps(self, epoch: int) -> int:
        """Global batches in an epoch."""
        if self._is_saved(epoch):
            return int(self.arrays.batches.shape[0]) - 1
        return -(-self.arrays.num_packs // self.packer.global_batch_size)

    def steps_until(self, epochs: int, start: Position, cursors: Cursors = ()) -> int:
        """Global batches from a position to the end of the last of `epochs` epochs."""
        if start.epoch >= epochs:
            return 0
        begun = self._first_step(start.epoch, start.window) + start.batch
        return sum(self.num_steps(epoch) for epoch in range(start.epoch, epochs)) - begun

    def packed(self, start: Position, cursors: Cursors = ()) -> list[tuple[Bin, ...]]:
        """The packs of the global batches of one window."""
        first = self._first_step(start.epoch, start.window)
        last = self._first_step(start.epoch, start.window + 1)
        order = self.pack_order(start.epoch)
        cuts = [self._first_pack(start.epoch, step) for step in range(first, last + 1)]
        return [
            tuple(self.arrays.members(pack) for pack in order[a:b].tolist())
            for a, b in pairwise(cuts)
        ]

    def walk(self, start: Position, cursors: Cursors = ()) -> Iterator[PlannedBatch]:
        """Global batches from a position on, without end. There must be a pack."""
        assert self.arrays.num_packs > 0
        position = start
        while True:
            is_last = position.window + 1 >= self.windows(position.epoch)
            after = position.behind_window(ends_epoch=is_last)
            batches = cut_window(
                self.packed(position),
                Position(position.epoch, position.window),
                after,
                before=(),
                behind=(),
            )
            yield from batches[position.batch :]
            position = after

    def pack_order(self, epoch: int) -> Int64s:
        """(P,) the packs in the order of an epoch."""
        if self._is_saved(epoch):
            return np.arange(self.arrays.num_packs, dtype=np.int64)
        if self._order is None or self._order[0] != epoch:
            order = seeded_order(self.arrays.num_packs, PACK_RULE, self.seed, epoch)
            self._order = (epoch, order)
        return self._order[1]

    def _is_saved(self, epoch: int) -> bool:
        return self.keeps_order and epoch == 0

    def _first_step(self, epoch: int, window: int) -> int:
        """Global batches of the epoch before a window."""
        if self._is_saved(epoch):
            return int(self.arrays.windows[min(window, len(self.arrays.windows) - 1)])
        return min(window * BATCHES_PER_WINDOW, self.num_steps(epoch))

    def _first_pack(self, epoch: int, step: int) -> int:
        """Packs of the epoch before a global batch."""
        if self._is_saved(epoch):
            return int(self.arrays.batches[step])
        return min(step * self.packer.global_batch_size, self.arrays.num_packs)


def _starts(counts: Sequence[int]) -> Int64s:
    return np.concatenate(([0], np.cumsum(np.asarray(counts, np.int64)))).astype(np.int64)
