"""Saved packs as the pipeline uses a split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vlmpack.data.index.table import Int64s, PackPlace, SampleRef
from vlmpack.data.packs.manifest import Manifest, PackSpans
from vlmpack.data.plan.packers import Bin
from vlmpack.data.plan.packs import PackPlan
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.split import KnownSplit, probed_samples
from vlmpack.storage.fetch import ShardStamp


@dataclass(frozen=True)
class PackedSplit(KnownSplit):
    """Saved packs and the samples that they were made from.

    Args:
        config, fitted, identity, plan: see KnownSplit; samples have the numbers that the packs use.
        manifest: of the folder.
        spans: where packs lie; None for kind `plan`, whose samples are read from their shards.
        files: the folder's tars.
        holes: sample number -> (error class, reason) of those that could not be encoded.
    """

    plan: PackPlan
    manifest: Manifest
    spans: PackSpans | None
    files: tuple[ShardStamp, ...]
    holes: dict[int, tuple[str, str]]

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

    def pass_bins(self, places: Sequence[int], each: int) -> list[Bin]:
        """See Split: as their packs hold them, so that each pack is read once. What is in none is
        never trained, and left out; so are holes."""
        numbers = np.array([n for n in places if n not in self.holes], dtype=np.int64)
        packs, within = (column[numbers] for column in self._places)
        order = np.lexsort((within, packs))
        order = order[packs[order] >= 0]
        cuts = np.flatnonzero(np.diff(packs[order])) + 1
        found = (members.tolist() for members in np.split(numbers[order], cuts))
        return [tuple(members) for members in found if members]

    def probed(self, count: int, state: DataState) -> list[SampleRef]:
        """See Split. None where the original shards need not be there."""
        return [] if self.manifest.kind == "shards" else probed_samples(self.fitted, count)

    @cached_property
    def _places(self) -> tuple[Int64s, Int64s]:
        """(N,) a pack of each sample, -1 for none, and its (N,) place in it."""
        arrays, count = self.plan.arrays, self.fitted.table.num_samples
        packs, places = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        packs[arrays.numbers] = np.repeat(np.arange(arrays.num_packs), arrays.sizes)
        within = np.arange(arrays.numbers.shape[0]) - np.repeat(arrays.starts[:-1], arrays.sizes)
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
