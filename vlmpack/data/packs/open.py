"""A folder of packs as a split that a run trains on."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.lengths import ShardBuilder
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.table import Int64s, PackPlace, SampleRef
from vlmpack.data.packs.arrays import ARRAYS, PackSpans, load_arrays
from vlmpack.data.packs.compare import check_index, check_packs
from vlmpack.data.packs.manifest import MANIFEST, Manifest, file_digest, read_manifest
from vlmpack.data.packs.parts import tar_name
from vlmpack.data.packs.samples import SAMPLES, load_samples
from vlmpack.data.packs.write import HOLES
from vlmpack.data.plan.batches import Cursors, PlanSource, Position
from vlmpack.data.plan.packers import Bin, BudgetPacker
from vlmpack.data.plan.packs import PACK_RULE, PackArrays, PackPlan
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.protocols import Encoder
from vlmpack.data.splits.prepare import (
    dropped_samples,
    prepare_split,
    probed_samples,
    short_digest,
)
from vlmpack.data.splits.split import OnDropped, planned_rows
from vlmpack.data.splits.summary import DataSummary, EpochLength, summarise
from vlmpack.data.splits.survey import Survey, survey_split
from vlmpack.data.stores.fetch import Fetcher, ShardStamp
from vlmpack.errors import PacksError


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
        """The samples of a bin, all of them in its own pack.

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


def survey_data(
    config: DataConfig, encoder: Encoder, fetcher: Fetcher, resume: DataState | None = None
) -> Survey:
    """The shards of a split in any mode. Packs of kind `shards` need none of them.

    Raises:
        RecipeError, DataError: as survey_split.
        PacksError: there are no finished packs.
    """
    if config.packs is None:
        return survey_split(config, encoder, fetcher, resume)
    if read_manifest(config.packs.path).kind == "shards":
        return Survey((), "none")
    return survey_split(replace(config, shuffle="global"), encoder, fetcher)


def open_packed(
    config: DataConfig,
    survey: Survey,
    builder: ShardBuilder,
    settings: BuildSettings,
    on_dropped: OnDropped,
) -> PackedSplit:
    """Opens saved packs.

    Raises:
        PacksError: they are unfinished or damaged, or do not fit the recipe or its shards.
        DataError, EmptyDataError: as prepare_split, for kinds that need the original shards.
    """
    assert config.packs is not None
    folder = config.packs.path
    manifest = read_manifest(folder)
    check_packs(manifest, folder, config, builder.lengths.encoder)
    files = _check_files(manifest, folder)
    arrays, spans = load_arrays(folder / ARRAYS)
    if manifest.kind == "shards":
        fitted = load_samples(folder / SAMPLES)
    else:
        prepared = prepare_split(replace(config, shuffle="global"), survey, builder, settings)
        check_index(manifest, folder, prepared.identity, config.key)
        fitted = prepared.fitted
    on_dropped(dropped_samples(fitted))
    plan = PackPlan(
        arrays,
        sources=_sources(config, fitted, arrays),
        seed=config.seed,
        packer=BudgetPacker(
            budget=manifest.budget,
            global_batch_size=config.global_batch_size,
            scope="stream",
            sizes=lambda numbers: (
                fitted.table.num_tokens[numbers],
                fitted.table.num_patches[numbers],
            ),
        ),
        keeps_order=manifest.planner == "stream"
        and (manifest.seed, manifest.global_batch_size) == (config.seed, config.global_batch_size),
    )
    return PackedSplit(
        config=config,
        manifest=manifest,
        fitted=fitted,
        identity=_identity(config, manifest),
        plan=plan,
        spans=spans,
        files=files,
        holes=_read_holes(folder) if manifest.kind != "plan" else {},
    )


def _identity(config: DataConfig, manifest: Manifest) -> Identity:
    """What decides the order. The samples are those of the packs: that was compared."""
    return {
        "plan": PACK_RULE,
        "data.seed": config.seed,
        "data.shuffle": manifest.shuffle,
        "packing.mode": "offline",
        "packing.packs": manifest.plan,
        "packing.alignment": manifest.budget.alignment,
        "packing.max_sequences": manifest.budget.max_sequences,
        "training.seq_length": config.seq_length,
        "training.global_batch_size": config.global_batch_size,
        "encoder": short_digest(repr(sorted(manifest.encoder.items()))),
        **manifest.data,
    }


def _sources(config: DataConfig, fitted: Fitted, arrays: PackArrays) -> list[PlanSource]:
    """The split's sources with the draws that the packs hold of each."""
    starts = fitted.table.source_starts
    if len(starts) - 1 != len(config.sources):
        raise PacksError(
            f"packing.path: the packs were made from {len(starts) - 1} sources, {config.key} has "
            f"{len(config.sources)}; restore these, or pack again"
        )
    owner = np.searchsorted(starts[1:], arrays.numbers, side="right")
    draws = np.bincount(owner, minlength=len(starts) - 1)
    return [
        PlanSource(
            source.name,
            np.flatnonzero(fitted.eligible[starts[d] : starts[d + 1]]).astype(np.int64) + starts[d],
            int(draws[d]),
        )
        for d, source in enumerate(config.sources)
    ]


def _check_files(manifest: Manifest, folder: Path) -> tuple[ShardStamp, ...]:
    """The folder's tars. Their bytes are checked when they are read, pack by pack.

    Raises:
        PacksError: a file is missing or has another size, or a small one other content.
    """
    faults, tars = [], {}
    for name, expected in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif isinstance(expected, int):
            found = path.stat().st_size
            if found != expected:
                faults.append(f"{name}: {found} bytes, {expected} were written")
            tars[name] = ShardStamp(str(path), expected, "")
        elif file_digest(path) != expected:
            faults.append(f"{name}: not what was written")
    if faults:
        raise PacksError(
            "\n".join(
                [
                    f"packing.path: {folder} is not as {MANIFEST} describes it:",
                    *(f"  {line}" for line in faults),
                    "Copy it again, or pack again.",
                ]
            )
        )
    return tuple(tars[tar_name(number)] for number in range(len(tars)))


def _read_holes(folder: Path) -> dict[int, tuple[str, str]]:
    found = json.loads((folder / HOLES).read_text(encoding="utf-8"))
    return {int(number): (name, reason) for number, (name, reason) in found.items()}
