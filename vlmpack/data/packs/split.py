"""Saved packs as the pipeline uses a split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.table import Int64s, PackPlace, SampleRef
from vlmpack.data.packs.arrays import PackSpans
from vlmpack.data.packs.manifest import Manifest
from vlmpack.data.plan.batches import Cursors, Position
from vlmpack.data.plan.packers import Bin
from vlmpack.data.plan.packs import PackPlan
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.splits.length_probe import probed_samples
from vlmpack.data.splits.split import planned_rows
from vlmpack.data.splits.summary import DataSummary, EpochLength, summarise
from vlmpack.storage.fetch import ShardStamp


@dataclass(frozen=True)
class PackedSplit:
    """Saved packs and the samples that they were made from.

    Args:
        config: the split.
        manifest: of the folder.
        fitted: the samples, by the numbers that the packs use.
        identity: what decides their order.
        plan: the global batches.
        spans: where packs lie; None for kind `plan`, whose samples are read from their shards.
        files: the folder's tars.
        holes: sample number -> (error class, reason) of those that could not be encoded.
    """

    config: DataConfig
    manifest: Manifest
    fitted: Fitted
    identity: Identity
    plan: PackPlan
    spans: PackSpans | None
    files: tuple[ShardStamp, ...]
    holes: dict[int, tuple[str, str]]

    def start(self, epoch: int = 0, first_pass: int = 0) -> Cursors:
        """See Split. Packs are drawn once an epoch: the position says it all."""
        return ()

    def ref(self, number: int) -> SampleRef:
        """See Split."""
        ref = self.fitted.table.ref(number)
        if number in self.holes:
            error_class, reason = self.holes[number]
            ref = replace(ref, error_class=error_class, reason=reason)
        if self.spans is None:
            return ref
        packs, places = self._places
        if packs[number] < 0:
            return ref
        return replace(ref, pack=self._place(int(packs[number]), int(places[number])))

    def refs(self, samples: Bin) -> tuple[SampleRef, ...]:
        """See Split. All of them are in the bin's own pack.

        With weights a sample may be in several packs; `ref` knows one of them.
        """
        refs = [self.ref(number) for number in samples]
        pack = self._pack_of(samples) if self.spans is not None else None
        if pack is None:
            return tuple(refs)
        return tuple(replace(ref, pack=self._place(pack, place)) for place, ref in enumerate(refs))

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """See Split."""
        return self.fitted.table.num_tokens[numbers], self.fitted.table.num_patches[numbers]

    def epoch_length(self) -> EpochLength:
        """See Split."""
        return EpochLength(self.plan.epoch_size, self.plan.num_steps(0), exact=True)

    def steps_until(self, epochs: int, state: DataState) -> int:
        """See Split."""
        return self.plan.steps_until(epochs, state.position)

    def numbers(self) -> list[tuple[str, Int64s]]:
        """See Split."""
        return [(source.name, source.numbers) for source in self.plan.sources]

    def index_all(self) -> None:
        """See Split."""

    def usable_tokens(self) -> Int64s:
        """See Split."""
        return self.fitted.table.num_tokens[self.fitted.eligible]

    def probed(self, count: int, state: DataState) -> list[SampleRef]:
        """See Split. None where the original shards need not be there."""
        return [] if self.manifest.kind == "shards" else probed_samples(self.fitted, count)

    def summary(self) -> DataSummary:
        """See Split."""
        order, bins = planned_rows(
            self.plan.packed(Position(0, w)) for w in range(self.plan.num_windows)
        )
        return summarise(
            [self.fitted],
            num_shards=len(self.fitted.table.shards),
            epoch=self.epoch_length(),
            tokens=self.fitted.table.num_tokens[order],
            bins=bins,
        )

    def close(self) -> None:
        """See Split."""

    @cached_property
    def _places(self) -> tuple[Int64s, Int64s]:
        """(N,) a pack of each sample, -1 for none, and its (N,) place in it."""
        arrays, count = self.plan.arrays, self.fitted.table.num_samples
        packs, places = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        sizes = np.diff(arrays.starts)
        packs[arrays.numbers] = np.repeat(np.arange(arrays.num_packs), sizes)
        within = np.arange(arrays.numbers.shape[0]) - np.repeat(arrays.starts[:-1], sizes)
        places[arrays.numbers] = within
        return packs, places

    @cached_property
    def _by_first(self) -> tuple[Int64s, Int64s]:
        """(P,) the first sample of each pack, ascending, and the packs in that order."""
        arrays = self.plan.arrays
        firsts = arrays.numbers[arrays.starts[:-1]]
        order = np.argsort(firsts, kind="stable")
        return firsts[order], order

    def _pack_of(self, samples: Bin) -> int | None:
        """The pack with exactly these members; None for a bin that is none."""
        if not samples:
            return None
        firsts, order = self._by_first
        at = int(np.searchsorted(firsts, samples[0]))
        while at < len(firsts) and firsts[at] == samples[0]:
            if self.plan.arrays.members(int(order[at])) == tuple(samples):
                return int(order[at])
            at += 1
        return None

    def _place(self, pack: int, place: int) -> PackPlace:
        spans = self.spans
        assert spans is not None
        return PackPlace(
            stamp=self.files[int(spans.files[pack])],
            offset=int(spans.offsets[pack]),
            length=int(spans.lengths[pack]),
            crc32=int(spans.crc32s[pack]),
            place=place,
        )
