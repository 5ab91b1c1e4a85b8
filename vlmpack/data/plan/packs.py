"""The global batches of saved packs: whole packs, in an order of each epoch's own.

Epoch 0 of packs of an online plan has that plan's global batches, if seed and global batch are
unchanged. Every other epoch permutes the packs by (seed, epoch) and never their samples. Packs that
are cut inside global batches (`packing.scope: batch`) keep these whole. Then epochs permute the
global batches, and a short one stays last. A window is a slice of global batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, pairwise

import numpy as np

from vlmpack.activity import ACTIVITY
from vlmpack.data.index.table import Int64s, starts_of
from vlmpack.data.plan.batches import Cursors, KnownPlan, PlanSource, Position, seeded_order
from vlmpack.data.plan.packers import BATCHES_PER_WINDOW, Bin, BudgetPacker

PACK_RULE = "packs-1"
"""Changes whenever the same packs would come in another order."""


@dataclass(frozen=True, slots=True)
class PackArrays:
    """The packs of an epoch, or rows that are planned and not saved.

    Args:
        numbers: (n,) sample numbers, pack after pack.
        starts: (P + 1,) where each pack begins in `numbers`.
        batches: (B + 1,) packs before each global batch of the online plan; empty where packs do
            not stay inside them (planner `bfd`, scope `stream`).
        windows: (W + 1,) global batches before each window of it; empty likewise.
    """

    numbers: Int64s
    starts: Int64s
    batches: Int64s
    windows: Int64s

    @property
    def num_packs(self) -> int:
        """P, the number of packs."""
        return int(self.starts.shape[0]) - 1

    @property
    def sizes(self) -> Int64s:
        """(P,) samples in each."""
        return np.diff(self.starts)

    @property
    def set_sizes(self) -> Int64s:
        """(B,) samples in each global batch."""
        return np.diff(self.starts[self.batches])

    def members(self, pack: int) -> Bin:
        """The samples of a pack, in row order."""
        members: list[int] = self.numbers[self.starts[pack] : self.starts[pack + 1]].tolist()
        return tuple(members)

    def each(self) -> Iterator[Int64s]:
        """The samples of each pack, in row order."""
        for start, stop in pairwise(self.starts.tolist()):
            yield self.numbers[start:stop]

    def to_mapping(self) -> dict[str, Int64s]:
        """The arrays by the names of their fields."""
        names = ("numbers", "starts", "batches", "windows")
        return {name: getattr(self, name) for name in names}

    @property
    def fingerprint(self) -> str:
        """A digest of which samples share a pack, and in which order."""
        digest = hashlib.blake2b(digest_size=16)
        for array in self.to_mapping().values():
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @classmethod
    def of(cls, windows: Iterable[Sequence[Sequence[Bin]]]) -> PackArrays:
        """From each window's global batches of packs. A window is freed before the next is
        requested."""
        numbers = [np.empty(0, np.int64)]
        packs: list[int] = []
        batches: list[int] = []
        steps: list[int] = []
        for window in windows:
            ACTIVITY.worked()
            members = chain.from_iterable(chain.from_iterable(window))
            numbers.append(np.fromiter(members, np.int64))
            packs += (len(pack) for batch in window for pack in batch)
            batches += map(len, window)
            steps.append(len(window))
        joined = np.concatenate(numbers)
        return cls(joined, starts_of(packs), starts_of(batches), starts_of(steps))

    @classmethod
    def unordered(cls, packs: Sequence[Int64s]) -> PackArrays:
        """From packs without an order by global batches."""
        none = np.zeros(0, np.int64)
        numbers = np.concatenate(packs) if packs else none
        return cls(numbers, starts_of([len(pack) for pack in packs]), none, none)


@dataclass(eq=False)
class PackPlan(KnownPlan):
    """All global batches of all epochs of saved packs.

    Args:
        packer: gives the size of packs and global batches (packs, or samples under scope `batch`);
            nothing is packed.
        keeps_order: whether the first epoch keeps the saved order and global batches.
    """

    arrays: PackArrays
    _: KW_ONLY
    sources: Sequence[PlanSource]
    seed: int
    packer: BudgetPacker
    keeps_order: bool

    def __post_init__(self) -> None:
        self._known: tuple[int, tuple[Int64s, Int64s]] | None = None
        self._even = _even_bounds(self.arrays.num_packs, self.packer.global_batch_size)
        num_batches = len(self.arrays.batches if self.packer.packs_by_batch else self._even) - 1
        self._even_windows = _even_bounds(num_batches, BATCHES_PER_WINDOW)

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        return int(self.arrays.numbers.shape[0])

    def windows(self, epoch: int) -> int:
        """See KnownPlan."""
        return len(self._windows(epoch)) - 1

    def window_steps(self, epoch: int) -> list[int]:
        """See KnownPlan."""
        steps: list[int] = np.diff(self._windows(epoch)).tolist()
        return steps

    def packed(self, start: Position, cursors: Cursors = ()) -> list[tuple[Bin, ...]]:
        """See KnownPlan: nothing is packed, the packs of each are taken."""
        order, batches = self._ordered(start.epoch)
        first, last = self._windows(start.epoch)[start.window : start.window + 2]
        return [
            tuple(self.arrays.members(pack) for pack in order[a:b].tolist())
            for a, b in pairwise(batches[first : last + 1].tolist())
        ]

    def _is_saved(self, epoch: int) -> bool:
        return self.keeps_order and epoch == 0

    def _windows(self, epoch: int) -> Int64s:
        """(W + 1,) global batches before each window of an epoch."""
        return self.arrays.windows if self._is_saved(epoch) else self._even_windows

    def _ordered(self, epoch: int) -> tuple[Int64s, Int64s]:
        """(P,) the packs in an epoch's order, and (B + 1,) packs before each of its global
        batches."""
        if self._is_saved(epoch):
            return np.arange(self.arrays.num_packs, dtype=np.int64), self.arrays.batches
        if self._known is None or self._known[0] != epoch:
            if self.packer.packs_by_batch:
                ordered = self._permuted_sets(epoch)
            else:
                order = seeded_order(self.arrays.num_packs, PACK_RULE, self.seed, epoch)
                ordered = order, self._even
            self._known = (epoch, ordered)
        return self._known[1]

    def _permuted_sets(self, epoch: int) -> tuple[Int64s, Int64s]:
        """The same with every global batch whole; a short one stays behind the others."""
        arrays = self.arrays
        sizes = arrays.set_sizes
        sets = seeded_order(sizes.shape[0], PACK_RULE, "sets", self.seed, epoch)
        is_short = sizes[sets] < self.packer.global_batch_size
        sets = sets[np.argsort(is_short, kind="stable")]
        counts = np.diff(arrays.batches)[sets]
        batches = np.concatenate(([0], np.cumsum(counts)))
        order = np.arange(arrays.num_packs) + np.repeat(arrays.batches[sets] - batches[:-1], counts)
        return order, batches


def _even_bounds(count: int, each: int) -> Int64s:
    """(n + 1,) where ranges of `each` begin and end; the last may be short."""
    return np.append(np.arange(0, count, each), count)
